//! The main menu. Invariant: it links only to existing pages, which a test checks against the routes.

/// A menu entry. `here` is the name that its pages pass to `Frame::new`.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) here: &'static str,
    pub(crate) path: &'static str,
    pub(crate) label: &'static str,
    /// The SVG path of a 20 × 20 line icon.
    pub(crate) icon: &'static str,
}

#[derive(Debug)]
pub(crate) struct Group {
    /// Empty for the first group.
    pub(crate) label: &'static str,
    pub(crate) entries: &'static [Entry],
}

const fn entry(here: &'static str, path: &'static str, label: &'static str, icon: &'static str) -> Entry {
    Entry {
        here,
        path,
        label,
        icon,
    }
}

/// Pages for the team and for customers, who see only their own data.
#[rustfmt::skip]
pub(crate) const MENU: &[Group] = &[
    Group { label: "", entries: &[
        entry("overview", "/", "Overview", "M3 17V9m5 8V3m5 14v-6m4 6V6"),
        entry("events", "/events", "Events", "M11 2.500 4.500 11.500H9l-.5 6 7-9H11z"),
        entry("deliveries", "/deliveries", "Deliveries", "M3 4h14M3 8h14M3 12h9M3 16h9m3-3 3 3-3 3"),
        entry("endpoints", "/endpoints", "Endpoints", "M10 3v5m0 4v5M4 10h4m4 0h4M10 12a2 2 0 1 0 0-4 2 2 0 0 0 0 4zM3 8.500v3m14-3v3M8.500 3h3m-3 14h3"),
    ] },
    Group { label: "Recovery", entries: &[
        entry("dead-letters", "/dead-letters", "Dead letters", "M3 5h14v10H3zM3 6l7 5 7-5M7.5 18l5-5m0 5-5-5"),
        entry("replays", "/replays", "Replays", "M4 10a6 6 0 1 1 2 4.500M4 15v-4.500h4.500"),
    ] },
    Group { label: "Integrate", entries: &[
        entry("event-types", "/event-types", "Event types", "M4 3h8l4 4v10H4zM12 3v4h4M7 11h6m-6 3h6"),
        entry("verify", "/verify", "Verification code", "M10 2l6 2.500v5c0 4-2.500 6.500-6 8.500-3.500-2-6-4.500-6-8.500v-5zM7 10l2 2 4-4.500"),
        entry("docs", "/docs", "API reference", "M7 6l-4 4 4 4m6-8 4 4-4 4M11.500 4l-3 12"),
        entry("signatures", "/signatures", "Signature debugger", "M3 16c2-6 4-11 6-11s-1 11 1 11 2-5 4-5 1 3 3 3"),
    ] },
];

/// Pages for the team only.
#[rustfmt::skip]
pub(crate) const TEAM: &[Group] = &[
    Group { label: "Operations", entries: &[
        entry("tenants", "/tenants", "Tenants", "M3 17V5l7-2v14m0-9h7v9M2 17h16M6 8h1m-1 4h1m6-1h1m-1 3h1"),
        entry("audit", "/audit", "Audit log", "M5 3h10v14l-2.500-1.500L10 17l-2.500-1.500L5 17zM8 7h4m-4 3h4"),
        entry("system", "/system", "System", "M3 4h14v5H3zm0 7h14v5H3zm3-4.500h.01M6 13.500h.01"),
    ] },
];

/// Pages for admins only.
#[rustfmt::skip]
pub(crate) const ADMIN: &[Group] = &[
    Group { label: "Admin", entries: &[
        entry("api-keys", "/api-keys", "API keys", "M12.500 3a4.500 4.500 0 1 0-4.200 6.200L3 14.500V17h3v-2h2v-2h1.500l1.300-1.300A4.500 4.500 0 0 0 12.500 3zm1 3.500h.01"),
        entry("people", "/people", "People", "M7 9a3 3 0 1 0 0-6 3 3 0 0 0 0 6zm-5 8c0-3.3 2.2-5 5-5s5 1.7 5 5m1-14a3 3 0 0 1 0 6m2.500 2.600C17 12.300 18 14 18 17"),
    ] },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_menu_links_only_to_existing_pages() {
        let routes = crate::routes::build(
            crate::auth::tests::app().await,
            None,
            crate::pages::live::Live::default(),
        )
        .1;
        for entry in MENU
            .iter()
            .chain(TEAM)
            .chain(ADMIN)
            .flat_map(|group| group.entries)
        {
            assert!(
                routes
                    .iter()
                    .any(|route| route.method == "GET" && route.path == entry.path),
                "{entry:?}"
            );
        }
    }
}
