//! JSON set out in lines for people. It is not parsed into values: numbers, escapes and repeated keys stand as they came.
//! What is no JSON comes out nearly as it went in, and never panics.

const INDENT: &str = "  ";

pub(crate) fn indented(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    let mut depth: usize = 0;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' => {
                out.push('"');
                while let Some(inside) = chars.next() {
                    out.push(inside);
                    match inside {
                        '\\' => out.extend(chars.next()),
                        '"' => break,
                        _ => {}
                    }
                }
            }
            '{' | '[' => {
                out.push(c);
                while chars.peek().is_some_and(|next| next.is_ascii_whitespace()) {
                    chars.next();
                }
                // What is empty stays on its line.
                match chars.peek() {
                    Some(close @ ('}' | ']')) => {
                        out.push(*close);
                        chars.next();
                    }
                    _ => {
                        depth += 1;
                        break_line(&mut out, depth);
                    }
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                break_line(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(',');
                break_line(&mut out, depth);
            }
            ':' => out.push_str(": "),
            c if c.is_ascii_whitespace() => {}
            c => out.push(c),
        }
    }
    out
}

fn break_line(out: &mut String, depth: usize) {
    out.push('\n');
    for _ in 0..depth {
        out.push_str(INDENT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_set_out_and_every_token_stays_as_it_was() {
        let text = r#"{"a":[1.0,{}, []],"b" : "x,{\"y\":1}\u0000", "a":12345678901234567890}"#;
        let expected = "{\n  \"a\": [\n    1.0,\n    {},\n    []\n  ],\n  \"b\": \"x,{\\\"y\\\":1}\\u0000\",\n  \"a\": 12345678901234567890\n}";
        assert_eq!(indented(text), expected);
    }

    #[test]
    fn what_is_no_json_does_no_harm() {
        for text in ["", "}", "\"", "{\"a", "\\", "<script>", "{\"a\\"] {
            indented(text);
        }
    }
}
