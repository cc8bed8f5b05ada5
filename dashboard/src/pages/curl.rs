//! Renders a request as a cURL command that can be pasted into a shell.
//! Invariant: customer input is always inside single quotes, so that the shell treats it as text.

use postrider_proto::api::Attempt;

/// Longer bodies are read from a file: operating systems limit the length of an argument, and the page would get long.
const BODY_BYTES_MAX: usize = super::BODY_SHOWN_BYTES_MAX;

/// The request of the latest attempt, or an unsigned one if none has been sent yet.
pub(crate) fn command(url: &str, attempt: Option<&Attempt>, body: &str) -> String {
    let mut lines = vec![format!("curl -sS -i -X POST {}", quoted(url))];
    match attempt.filter(|attempt| !attempt.request_headers.is_empty()) {
        Some(attempt) => lines.extend(
            attempt
                .request_headers
                .iter()
                .map(|(name, value)| format!("-H {}", quoted(&format!("{name}: {value}")))),
        ),
        None => lines.push("-H 'Content-Type: application/json'".to_owned()),
    }
    if body.len() > BODY_BYTES_MAX {
        lines.push("--data-binary @body.json".to_owned());
        let comment = "# The body is long. Download it as body.json first.";
        return format!("{comment}\n{}", lines.join(" \\\n  "));
    }
    lines.push(format!("--data-raw {}", quoted(body)));
    lines.join(" \\\n  ")
}

/// A call of the API with a JSON body. The key is read from the environment of the shell.
pub(crate) fn api_call(url: &str, body: &str) -> String {
    let lines = [
        format!("curl -sS -X POST {}", quoted(url)),
        "-H \"Authorization: Bearer $POSTRIDER_API_KEY\"".to_owned(),
        "-H 'Content-Type: application/json'".to_owned(),
        format!("--data-raw {}", quoted(body)),
    ];
    lines.join(" \\\n  ")
}

/// A single quote in the text closes the quotes, is escaped, and reopens them.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_body_too_long_for_a_shell_is_read_from_a_file() {
        let command = command("https://a.example", None, &"'".repeat(200_000));
        assert!(
            command.contains("@body.json") && command.len() < 1_000,
            "{command}"
        );
    }

    #[test]
    fn a_shell_reads_quoted_text_back_unchanged() {
        for text in [
            "plain",
            "it's",
            "$(id) `id` \\ \"",
            "a\nb",
            "'; rm -rf x; '",
            "!h",
        ] {
            let shell = Command::new("sh")
                .arg("-c")
                .arg(format!("printf %s {}", quoted(text)))
                .output()
                .expect("a shell");
            assert_eq!(String::from_utf8_lossy(&shell.stdout), text);
        }
    }
}
