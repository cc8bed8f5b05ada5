//! What must hold for any bytes, tried with some: half of them noise, half of them made of the pieces that parsers look
//! for. `fuzz/` runs the same without end.

#[path = "../../fuzz/properties.rs"]
mod any_bytes;

use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Inputs for each property. A fixed seed: a test that fails now and then says nothing.
const INPUTS: usize = 20_000;
const SEED: u64 = 8;
const PIECES: &[&str] = &[
    "127.0.0.1",
    "0x7f",
    "0177",
    "::1",
    "::ffff:",
    "169.254",
    "10.",
    ".",
    ":",
    "/",
    "@",
    "#",
    "?",
    "\\",
    "%31",
    "%00",
    "localhost",
    "example.com",
    "xn--",
    "https://",
    "http:",
    "１",
    "。",
    "\t",
    "\n",
    "\0",
    "\u{ad}",
    "65536",
    "t=",
    "v1=",
    "v1,",
    ",",
    "=",
    "1700000000",
    "-1",
    "1e9",
    "ab",
    "AAAA",
    "99999999999999999999",
    "GMT",
    "Fri, ",
    "2026",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\"a\":",
    "\"/a\":",
    "\"eq\":",
    "\"in\":",
    "\"and\":",
    "\"not\":",
    "\"gte\":",
    "1",
    "1e400",
    "null",
    "true",
    "\\u0000",
    "\\ud800",
    "\"type\":\"a\",",
    "\"data\":{}",
    "\"id\":",
    " ",
    "é",
    "🚚",
];

fn input(rng: &mut StdRng) -> Vec<u8> {
    let length = rng.random_range(0..40_usize);
    match rng.random_range(0..4_u8) {
        0 => (0..length).map(|_| rng.random::<u8>()).collect(),
        1 => (0..length).map(|_| rng.random_range(0x20..0x7f_u8)).collect(),
        _ => {
            let piece = |_| PIECES[rng.random_range(0..PIECES.len())];
            (0..length / 3).map(piece).collect::<String>().into_bytes()
        }
    }
}

fn hold(property: fn(&[u8])) {
    let mut rng = StdRng::seed_from_u64(SEED);
    for _ in 0..INPUTS {
        let input = input(&mut rng);
        let held = std::panic::catch_unwind(|| property(&input));
        assert!(
            held.is_ok(),
            "it does not hold for {:?}",
            String::from_utf8_lossy(&input)
        );
    }
}

#[test]
fn no_signature_header_verifies_that_was_not_signed() {
    hold(any_bytes::signature_headers);
}

#[test]
fn a_url_that_is_taken_leads_outside() {
    hold(any_bytes::urls);
}

#[test]
fn an_address_is_judged_the_same_in_every_spelling() {
    hold(any_bytes::addresses);
}

#[test]
fn a_filter_is_refused_or_answers() {
    hold(any_bytes::filters);
}

#[test]
fn retry_after_is_a_day_at_most() {
    hold(any_bytes::retry_after);
}

#[test]
fn an_emit_body_is_refused_or_kept_as_it_is() {
    hold(any_bytes::emit_bodies);
}
