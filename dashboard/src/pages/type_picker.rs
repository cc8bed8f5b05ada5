//! The choice of event types in an endpoint's form: a checkbox for each type of the catalogue and for each group of types.
//! What has no checkbox, such as a pattern with two dots, is text.

use std::collections::BTreeMap;

use postrider_proto::routing::matching_patterns;

use crate::{Pool, http::problem::Problem, tables::event_types};

/// Types with a checkbox. The others can be entered as text.
const TYPES_SHOWN_MAX: i64 = 500;

/// The name of a checkbox is this and its pattern.
pub(super) const FIELD: &str = "type:";

pub(super) struct TypePicker {
    pub(super) all: Choice,
    pub(super) groups: Vec<Group>,
    /// The chosen patterns without a checkbox, one per line.
    pub(super) others: String,
    /// The catalogue has more types than are shown.
    pub(super) is_cut: bool,
}

/// Types with the same first segment.
pub(super) struct Group {
    /// Empty for types of one segment.
    pub(super) name: String,
    /// The pattern that matches the whole group.
    pub(super) whole: Option<Choice>,
    pub(super) types: Vec<Choice>,
}

pub(super) struct Choice {
    pub(super) pattern: String,
    pub(super) description: String,
    pub(super) is_chosen: bool,
    /// The patterns that include this one.
    pub(super) included_in: String,
}

impl Choice {
    fn of(pattern: &str, description: &str, chosen: &[String]) -> Self {
        let wider = match pattern.strip_suffix(".*") {
            // Those of any type in the group, without the group itself.
            Some(group) => matching_patterns(&format!("{group}.any")),
            None => matching_patterns(pattern),
        };
        let wider: Vec<String> = wider.into_iter().take_while(|one| one != pattern).collect();
        Self {
            description: description.to_owned(),
            is_chosen: chosen.iter().any(|one| one == pattern),
            included_in: wider.join(" "),
            pattern: pattern.to_owned(),
        }
    }
}

impl TypePicker {
    pub(super) const TYPES_SHOWN_MAX: i64 = TYPES_SHOWN_MAX;

    pub(super) async fn load(pool: &Pool, chosen: &[String]) -> Result<Self, Problem> {
        let mut rows = event_types::list(pool, "", TYPES_SHOWN_MAX + 1).await?;
        let is_cut = rows.len() as i64 > TYPES_SHOWN_MAX;
        rows.truncate(TYPES_SHOWN_MAX as usize);
        let types: Vec<(&str, &str)> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.description.as_deref().unwrap_or_default()))
            .collect();
        Ok(Self::of(&types, chosen, is_cut))
    }

    fn of(types: &[(&str, &str)], chosen: &[String], is_cut: bool) -> Self {
        let mut by_name: BTreeMap<&str, Vec<Choice>> = BTreeMap::new();
        for (name, description) in types {
            let group = name.split_once('.').map_or("", |(first, _)| first);
            let choice = Choice::of(name, description, chosen);
            by_name.entry(group).or_default().push(choice);
        }
        let groups: Vec<Group> = by_name
            .into_iter()
            .map(|(name, types)| Group {
                whole: (!name.is_empty()).then(|| Choice::of(&format!("{name}.*"), "", chosen)),
                name: name.to_owned(),
                types,
            })
            .collect();
        let has_box = |pattern: &&String| {
            let of_group = |group: &Group| {
                let whole = group.whole.iter();
                whole.chain(&group.types).any(|one| one.pattern == **pattern)
            };
            *pattern == "*" || groups.iter().any(of_group)
        };
        let others: Vec<&str> = chosen
            .iter()
            .filter(|pattern| !has_box(pattern))
            .map(String::as_str)
            .collect();
        Self {
            others: others.join("\n"),
            all: Choice::of("*", "", chosen),
            groups,
            is_cut,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_grouped_by_their_first_segment_and_the_rest_is_text() {
        let types = [
            ("invoice.paid", "Paid"),
            ("invoice.sent", ""),
            ("ping", ""),
            ("postrider.delivery.dead", ""),
        ];
        let chosen = ["invoice.*", "ping", "order.line.*", "typo"].map(str::to_owned);
        let picker = TypePicker::of(&types, &chosen, false);
        let names: Vec<&str> = picker.groups.iter().map(|group| group.name.as_str()).collect();
        assert_eq!(names, ["", "invoice", "postrider"]);
        assert_eq!(picker.others, "order.line.*\ntypo");
        assert!(!picker.all.is_chosen && picker.groups[0].types[0].is_chosen);
        let invoice = &picker.groups[1];
        let whole = invoice.whole.as_ref().expect("a group");
        assert!(whole.is_chosen && !invoice.types[0].is_chosen);
        assert_eq!(whole.included_in, "*");
        assert_eq!(invoice.types[0].included_in, "* invoice.*");
        // Operational events have to be subscribed to by name.
        let operational = &picker.groups[2];
        assert_eq!(
            operational.types[0].included_in,
            "postrider.* postrider.delivery.*"
        );
        assert_eq!(operational.whole.as_ref().expect("a group").included_in, "");
    }
}
