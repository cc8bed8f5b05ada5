//! Stylesheets, script, font and icon, compiled into the program. Their addresses contain a version, so that browsers keep
//! them for good and still get a new one with the next release.

use std::sync::LazyLock;

use axum::{
    extract::RawQuery,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

const VERSION_BYTES: usize = 8;
const FOR_GOOD: &str = "public, max-age=31536000, immutable";
/// For an address without the current version.
const ASK_AGAIN: &str = "public, no-cache";

struct Asset {
    path: &'static str,
    kind: &'static str,
    content: Vec<u8>,
    version: String,
}

impl Asset {
    fn new(path: &'static str, kind: &'static str, content: impl Into<Vec<u8>>) -> Self {
        let content = content.into();
        let digest = Sha256::digest(&content);
        Self {
            version: HEXLOWER.encode(&digest[..VERSION_BYTES]),
            path,
            kind,
            content,
        }
    }

    fn address(&self) -> String {
        format!("{}?v={}", self.path, self.version)
    }

    fn serve(&self, query: Option<&str>, headers: &HeaderMap) -> Response {
        let is_current = query.and_then(|query| query.strip_prefix("v=")) == Some(self.version.as_str());
        let cache = if is_current { FOR_GOOD } else { ASK_AGAIN };
        // Weak: the same asset may be sent compressed.
        let tag = format!("W/\"{}\"", self.version);
        let is_known = headers
            .get_all(header::IF_NONE_MATCH)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .any(|value| value.contains(&self.version));
        let mut response = match is_known {
            true => StatusCode::NOT_MODIFIED.into_response(),
            false => ([(header::CONTENT_TYPE, self.kind)], self.content.clone()).into_response(),
        };
        let set = response.headers_mut();
        set.insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
        if let Ok(tag) = HeaderValue::from_str(&tag) {
            set.insert(header::ETAG, tag);
        }
        response
    }
}

/// Without indentation and lines of comments, which browsers need not load. A comment of a stylesheet ends where a line does.
fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut is_comment = false;
    for line in text.lines().map(str::trim) {
        is_comment |= line.starts_with("/*");
        if !is_comment && !line.is_empty() && !line.starts_with("//") {
            kept.push_str(line);
            kept.push('\n');
        }
        is_comment &= !line.ends_with("*/");
    }
    kept
}

static FONT: LazyLock<Asset> = LazyLock::new(|| {
    let content = include_bytes!("../../assets/inter.woff2").as_slice();
    Asset::new("/assets/inter.woff2", "font/woff2", content)
});
static STYLE: LazyLock<Asset> = LazyLock::new(|| {
    let text = without_comments(include_str!("../../assets/style.css")).replace(FONT.path, &FONT.address());
    Asset::new("/assets/style.css", "text/css; charset=utf-8", text)
});
static DOCS_STYLE: LazyLock<Asset> = LazyLock::new(|| {
    let text = include_str!("../../assets/docs.css").replace(FONT.path, &FONT.address());
    Asset::new("/assets/docs.css", "text/css; charset=utf-8", text)
});
static SCRIPT: LazyLock<Asset> = LazyLock::new(|| {
    let text = without_comments(include_str!("../../assets/app.js"));
    Asset::new("/assets/app.js", "text/javascript; charset=utf-8", text)
});
static MARK: LazyLock<Asset> = LazyLock::new(|| {
    let text = include_str!("../../assets/mark.svg");
    Asset::new("/assets/mark.svg", "image/svg+xml", text)
});

/// For templates.
pub(crate) fn style_address() -> String {
    STYLE.address()
}

pub(crate) fn docs_style_address() -> String {
    DOCS_STYLE.address()
}

pub(crate) fn script_address() -> String {
    SCRIPT.address()
}

pub(crate) fn mark_address() -> String {
    MARK.address()
}

pub(crate) async fn style(RawQuery(query): RawQuery, headers: HeaderMap) -> Response {
    STYLE.serve(query.as_deref(), &headers)
}

pub(crate) async fn docs_style(RawQuery(query): RawQuery, headers: HeaderMap) -> Response {
    DOCS_STYLE.serve(query.as_deref(), &headers)
}

pub(crate) async fn script(RawQuery(query): RawQuery, headers: HeaderMap) -> Response {
    SCRIPT.serve(query.as_deref(), &headers)
}

pub(crate) async fn mark(RawQuery(query): RawQuery, headers: HeaderMap) -> Response {
    MARK.serve(query.as_deref(), &headers)
}

pub(crate) async fn font(RawQuery(query): RawQuery, headers: HeaderMap) -> Response {
    FONT.serve(query.as_deref(), &headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stylesheet_names_the_font_with_its_version() {
        let text = String::from_utf8_lossy(&STYLE.content);
        assert!(text.contains(&FONT.address()));
    }

    #[test]
    fn comments_are_left_out_and_nothing_else() {
        let text = "/* one\n   two */\na { b: c; }\n\n  // three\n  d(\"// e\");\n/* four */\nf\n";
        assert_eq!(without_comments(text), "a { b: c; }\nd(\"// e\");\nf\n");
    }

    #[test]
    fn only_the_current_version_is_kept_for_good() {
        let cache = |query: Option<&str>| {
            let response = SCRIPT.serve(query, &HeaderMap::new());
            response.headers()[header::CACHE_CONTROL].clone()
        };
        let current = format!("v={}", SCRIPT.version);
        assert_eq!(cache(Some(&current)), FOR_GOOD);
        for other in [None, Some("v=0"), Some("")] {
            assert_eq!(cache(other), ASK_AGAIN, "{other:?}");
        }
        let tag = format!("W/\"{}\"", SCRIPT.version).parse().expect("a tag");
        let known = HeaderMap::from_iter([(header::IF_NONE_MATCH, tag)]);
        assert_eq!(SCRIPT.serve(None, &known).status(), StatusCode::NOT_MODIFIED);
    }
}
