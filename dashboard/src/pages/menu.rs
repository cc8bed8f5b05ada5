//! The menu at the side of every page. Invariant: it links only to pages that are there; a test holds it to the routes.

/// One page of the menu. `here` is what its pages call themselves in `Frame::new`.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) here: &'static str,
    pub(crate) path: &'static str,
    pub(crate) label: &'static str,
    /// The path of a line drawing, 20 by 20.
    pub(crate) icon: &'static str,
}

#[derive(Debug)]
pub(crate) struct Group {
    /// Empty for the first.
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

/// What customers see too, each their own.
#[rustfmt::skip]
pub(crate) const MENU: &[Group] = &[
    Group { label: "", entries: &[
        entry("overview", "/", "Overview", "M3 17V9m5 8V3m5 14v-6m4 6V6"),
        entry("deliveries", "/deliveries", "Deliveries", "M3 4h14M3 8h14M3 12h9M3 16h9m3-3 3 3-3 3"),
    ] },
    Group { label: "Recover", entries: &[
        entry("dead-letters", "/dead-letters", "Dead letters", "M3 5h14v10H3zM3 6l7 5 7-5M7.5 18l5-5m0 5-5-5"),
    ] },
];

/// For the team alone.
#[rustfmt::skip]
pub(crate) const TEAM: &[Group] = &[];

#[rustfmt::skip]
pub(crate) const ADMIN: &[Group] = &[
    Group { label: "Administer", entries: &[
        entry("people", "/people", "People", "M7 9a3 3 0 1 0 0-6 3 3 0 0 0 0 6zm-5 8c0-3.3 2.2-5 5-5s5 1.7 5 5m1-14a3 3 0 0 1 0 6m2.500 2.600C17 12.300 18 14 18 17"),
    ] },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_menu_links_only_to_pages_that_are_there() {
        let routes = crate::routes::build(crate::auth::tests::app().await).1;
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
