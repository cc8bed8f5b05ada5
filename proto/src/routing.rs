//! Event type names and the patterns that endpoints subscribe with.

use crate::limits::EVENT_TYPE_BYTES_MAX;

/// Types that Postrider itself emits. `*` does not match them: an endpoint must name them.
pub const RESERVED_PREFIX: &str = "postrider.";

/// `[a-z0-9_]+(\.[a-z0-9_]+)*`, at most 128 bytes.
pub fn is_type_name(text: &str) -> bool {
    text.len() <= EVENT_TYPE_BYTES_MAX && text.split('.').all(is_segment)
}

/// A type name, or `*`, or a prefix of whole segments and `.*`: `invoice.*`.
pub fn is_pattern(text: &str) -> bool {
    text == "*" || is_type_name(text.strip_suffix(".*").unwrap_or(text))
}

/// A version of a type's schema: `[A-Za-z0-9][A-Za-z0-9_.-]{0,63}`.
pub fn is_version(text: &str) -> bool {
    is_label(text)
}

/// A key that sorts as versions do, like `postrider.version_rank`: consecutive digits are a number, everything else
/// is compared character by character. The highest version of a type is its newest.
pub fn version_rank(version: &str) -> String {
    let mut rank = String::with_capacity(2 * version.len() + 8);
    let mut rest = version;
    while let Some(first) = rest.bytes().next() {
        let is_number = first.is_ascii_digit();
        let end = rest.find(|c: char| c.is_ascii_digit() != is_number);
        let (part, behind) = rest.split_at(end.unwrap_or(rest.len()));
        if is_number {
            // Of two numbers, the one with more digits is larger.
            let digits = part.trim_start_matches('0');
            rank.push_str(&format!("{:02}{digits}", digits.len()));
        } else {
            rank.push_str(part);
        }
        rest = behind;
    }
    // 1 and 01 are the same number but two versions.
    rank.push(' ');
    rank.push_str(version);
    rank
}

/// A tenant's slug has the same form as a version.
pub fn is_tenant_slug(text: &str) -> bool {
    is_label(text)
}

/// Every pattern that matches this type, stored with the type so that an emit compares two arrays.
pub fn matching_patterns(type_name: &str) -> Vec<String> {
    let mut patterns = Vec::new();
    if !type_name.starts_with(RESERVED_PREFIX) {
        patterns.push("*".to_owned());
    }
    for (dot, _) in type_name.match_indices('.') {
        patterns.push(format!("{}.*", &type_name[..dot]));
    }
    patterns.push(type_name.to_owned());
    patterns
}

fn is_segment(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

fn is_label(text: &str) -> bool {
    text.len() <= 64
        && text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_matches_itself_its_prefixes_and_the_star() {
        assert_eq!(
            matching_patterns("invoice.paid.late"),
            ["*", "invoice.*", "invoice.paid.*", "invoice.paid.late"]
        );
    }

    #[test]
    fn the_star_does_not_match_reserved_types() {
        assert_eq!(
            matching_patterns("postrider.endpoint.disabled"),
            [
                "postrider.*",
                "postrider.endpoint.*",
                "postrider.endpoint.disabled"
            ]
        );
    }

    #[test]
    fn names_and_patterns_are_told_from_nonsense() {
        for good in ["invoice", "invoice.paid", "a_1.b_2"] {
            assert!(is_type_name(good) && is_pattern(good), "{good}");
        }
        for good in ["*", "invoice.*", "a.b.*"] {
            assert!(is_pattern(good) && !is_type_name(good), "{good}");
        }
        for bad in [
            "", ".", "a.", ".a", "A", "a b", "a.*.b", "*.a", "**", "*.*", "a*", "../x", "a\0",
        ] {
            assert!(!is_pattern(bad) && !is_type_name(bad), "{bad:?}");
        }
        assert!(!is_type_name(&"a".repeat(129)));
    }

    #[test]
    fn versions_sort_by_their_numbers() {
        let sorted = [
            "0",
            "1",
            "01",
            "1-beta",
            "1.0",
            "1.0.1",
            "1.2",
            "1.10",
            "2",
            "10",
            "2026-01-15",
            "2026-01-15.2",
            "2026-02-01",
            "20260101000000000000000000",
            "A",
            "v",
            "v1",
            "v9",
            "v10",
            "v10a",
            "x",
        ];
        let mut again = sorted;
        again.reverse();
        again.sort_by_key(|version| version_rank(version));
        // The numbers are equal, so the text decides.
        let mut expected = sorted;
        expected.swap(1, 2);
        assert_eq!(again, expected);
    }

    #[test]
    fn labels_begin_with_a_letter_or_digit() {
        assert!(is_tenant_slug("acme") && is_version("2026-01-15") && is_tenant_slug("a.b_c-d"));
        for bad in ["", "-a", ".a", "a/b", "ä"] {
            assert!(!is_tenant_slug(bad), "{bad:?}");
        }
        assert!(!is_tenant_slug(&"a".repeat(65)));
    }
}
