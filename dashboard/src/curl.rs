//! A request as a command that can be pasted into a shell.
//! Invariant: whatever a customer supplied stands inside single quotes, so that the shell reads it as text.

use crate::transcript::Attempt;

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
