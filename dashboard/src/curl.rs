//! A request as a command that can be pasted into a shell.
//! Invariant: whatever a customer supplied stands inside single quotes, so that the shell reads it as text.

use crate::transcript::Attempt;

/// Systems take about 128 KiB as one argument, and quoting makes it longer.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// As the latest attempt was sent, or as the first will be, without a signature.
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
        let comment = "# The body is too long for a command line: save the raw body as body.json first.";
        return format!("{comment}\n{}", lines.join(" \\\n  "));
    }
    lines.push(format!("--data-raw {}", quoted(body)));
    lines.join(" \\\n  ")
}

/// A quote inside ends the text, is written by itself, and begins it again.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_body_that_no_shell_takes_is_read_from_a_file() {
        let command = command("https://a.example", None, &"'".repeat(200_000));
        assert!(
            command.contains("@body.json") && command.len() < 1_000,
            "{command}"
        );
    }

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
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
