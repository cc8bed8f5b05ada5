//! Numbers in text, for pages and for results that pages and the API share. Pure; `pages::stats_format` has the rest.

use std::fmt::Display;

/// An integer of any type with thousands separators: `1234567` as `1,234,567`.
pub(crate) fn grouped(number: impl Display) -> String {
    let number = number.to_string();
    let (sign, digits) = match number.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", number.as_str()),
    };
    let mut text = sign.to_owned();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number with its noun: `1 delivery`, `1,200 deliveries`.
pub(crate) fn counted(number: impl Display, singular: &str, plural: &str) -> String {
    let number = grouped(number);
    let noun = if number == "1" { singular } else { plural };
    format!("{number} {noun}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_separators_and_their_noun() {
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(123), "123");
        assert_eq!(grouped(-1_000), "-1,000");
        assert_eq!(counted(1, "delivery", "deliveries"), "1 delivery");
        assert_eq!(counted(0, "delivery", "deliveries"), "0 deliveries");
        assert_eq!(counted(1_200_i16, "delivery", "deliveries"), "1,200 deliveries");
    }
}
