//! Reads the expiry date of a certificate from its DER form, and nothing else. Pure.

use chrono::{DateTime, NaiveDateTime, Utc};

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// `notAfter` (RFC 5280, 4.1.2.5), or none if it can't be parsed.
pub(crate) fn valid_until(certificate: &[u8]) -> Option<DateTime<Utc>> {
    let (certificate, _) = inside(certificate, SEQUENCE)?;
    let (mut rest, _) = inside(certificate, SEQUENCE)?;
    if rest.first() == Some(&VERSION) {
        (_, _, rest) = next(rest)?;
    }
    // The serial number, the algorithm, the issuer.
    for _ in 0..3 {
        (_, _, rest) = next(rest)?;
    }
    let (validity, _) = inside(rest, SEQUENCE)?;
    let (_, _, after) = next(validity)?;
    let (tag, time, _) = next(after)?;
    let text = std::str::from_utf8(time).ok()?.strip_suffix('Z')?;
    let text = match tag {
        // Two-digit years: 50 to 99 are in the 20th century.
        UTC_TIME if text.get(..2)? >= "50" => format!("19{text}"),
        UTC_TIME => format!("20{text}"),
        GENERALIZED_TIME => text.to_owned(),
        _ => return None,
    };
    NaiveDateTime::parse_from_str(&text, "%Y%m%d%H%M%S")
        .ok()
        .map(|time| time.and_utc())
}

fn inside(bytes: &[u8], wanted: u8) -> Option<(&[u8], &[u8])> {
    let (tag, value, rest) = next(bytes)?;
    (tag == wanted).then_some((value, rest))
}

/// Tag, value and the remaining bytes.
fn next(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let count = usize::from(first & 0x7f);
        if count == 0 || count > 4 {
            return None;
        }
        let (digits, rest) = rest.split_at_checked(count)?;
        (
            digits
                .iter()
                .fold(0, |length, digit| length << 8 | usize::from(*digit)),
            rest,
        )
    };
    let (value, rest) = rest.split_at_checked(length)?;
    Some((tag, value, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_encoding::BASE64;

    /// Self-signed: one that expires in 2035 and so has a UTCTime, one that expires in 2200 and so has a
    /// GeneralizedTime.
    const SOON: &str = "MIHDMHegAwIBAgIBBzAFBgMrZXAwDDEKMAgGA1UEAwwBYTAeFw0yNjAxMDEwMDAwMDBaFw0zNTAxMDIwMzA0MDVaMAwxCjAIBgNVBAMMAWEwKjAFBgMrZXADIQCLhNNRspItmiFqMijFulEW/B37K0t+xaDIjervNWKDaDAFBgMrZXADQQA+fENdV55GFUPbbUS22Vb0jkoXKWMOXT6NK13bhvofJacaTnh3ZtsFC7FeEw4s6QR6p6Bh9vlW5TYes6FZI1sI";
    const LATE: &str = "MIHFMHmgAwIBAgIBBzAFBgMrZXAwDDEKMAgGA1UEAwwBYTAgFw0yNjAxMDEwMDAwMDBaGA8yMjAwMDEwMjAzMDQwNVowDDEKMAgGA1UEAwwBYTAqMAUGAytlcAMhAIuE01Gyki2aIWoyKMW6URb8HfsrS37FoMiN6u81YoNoMAUGAytlcANBAPxBlZcrF1yVVvH4tQcd1hw7JgkVVh4QP+ffVN34SKkEq4EldJxew6nk/1bZ2moVH23aDyb5vEBO5ql8ziZvbQo=";

    #[test]
    fn the_end_of_a_certificate_is_read_in_both_forms_of_time() {
        let read = |text: &str| {
            valid_until(&BASE64.decode(text.as_bytes()).expect("base64")).map(|time| time.to_rfc3339())
        };
        assert_eq!(read(SOON).as_deref(), Some("2035-01-02T03:04:05+00:00"));
        assert_eq!(read(LATE).as_deref(), Some("2200-01-02T03:04:05+00:00"));
    }

    #[test]
    fn what_is_no_certificate_has_no_end() {
        let whole = BASE64.decode(SOON.as_bytes()).expect("base64");
        for end in 0..120 {
            assert_eq!(valid_until(&whole[..end]), None, "{end}");
        }
        for bad in [
            &b"\x30\x84\xff\xff\xff\xff"[..],
            b"\x30\x80",
            b"hello",
            b"\x30\x03\x30\x01\xa0",
        ] {
            assert_eq!(valid_until(bad), None);
        }
    }
}
