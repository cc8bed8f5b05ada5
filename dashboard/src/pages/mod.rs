//! The pages of the dashboard and the customer portal, rendered on the server and usable without JavaScript.
//! Invariant: external input is always text. Templates escape it, and customers' URLs are never links.

pub(crate) mod account;
pub(crate) mod api_keys;
pub(crate) mod assets;
pub(crate) mod audit;
pub(crate) mod cells;
pub(crate) mod chart;
mod checklist;
pub(crate) mod curl;
pub(crate) mod dead_letters;
pub(crate) mod deliveries;
pub(crate) mod delivery;
mod delivery_list;
pub(crate) mod discards;
pub(crate) mod docs;
pub(crate) mod endpoint;
pub(crate) mod endpoint_actions;
pub(crate) mod endpoint_alert;
mod endpoint_form;
mod endpoint_form_view;
mod endpoint_glance;
pub(crate) mod endpoint_secrets;
pub(crate) mod endpoint_settings;
mod endpoint_trials;
mod endpoint_undelivered;
pub(crate) mod endpoints;
pub(crate) mod event;
pub(crate) mod event_type_form;
pub(crate) mod event_types;
pub(crate) mod events;
mod form_errors;
mod list_filters;
pub(crate) mod live;
mod markup;
mod menu;
pub(crate) mod overview;
pub(crate) mod people;
pub(crate) mod portal;
pub(crate) mod problem;
pub(crate) mod replay_preview;
pub(crate) mod replays;
pub(crate) mod schema_table;
pub(crate) mod search;
pub(crate) mod sign_in;
pub(crate) mod signature_debugger;
pub(crate) mod signatures;
pub(crate) mod stats_format;
pub(crate) mod system;
pub(crate) mod tenants;
mod type_picker;
pub(crate) mod verify;

use std::fmt;

use askama::{Template, filters::HtmlSafe};
use chrono::{DateTime, SecondsFormat, Utc};
use postrider_proto::{
    EventId,
    json::{LaidOut, lay_out_within},
};
use serde::Deserialize;

use form_errors::FormErrors;
pub(crate) use markup::Markup;

use crate::{
    actions::attempt_view::{error_summary, outcome_name},
    auth::{Role, Rule, Session},
    http::{cells::silent_text, page_problem::PageProblem},
    tables::{deliveries::Delivery, holds::Hold},
};

type Paged<T> = Result<T, PageProblem>;

/// The frame around every page of a signed-in user: menu, account and toast.
#[derive(Debug, Clone)]
struct Frame {
    login: String,
    csrf: String,
    /// The current menu entry.
    here: &'static str,
    /// Confirmation of the last action; disappears after a few seconds.
    toast: Option<&'static str>,
    /// Why nothing is sent.
    hold: Option<String>,
    /// Which cells the page lacks, because they did not respond.
    silent: Option<String>,
    role: Role,
}

impl Frame {
    fn new(session: Session, here: &'static str) -> Self {
        Self {
            login: session.login,
            csrf: session.csrf,
            here,
            toast: None,
            hold: session.hold,
            silent: None,
            role: session.role,
        }
    }

    /// For a page about all cells.
    fn without(mut self, silent: &[String]) -> Self {
        self.silent = silent_text(silent);
        self
    }

    /// Whether to show forms and buttons for routes with this rule.
    fn may_operate(&self) -> bool {
        Rule::Operate.admits(self.role)
    }

    /// Whether to show switches of the whole installation: read-only members of the team change nothing.
    fn may_switch(&self) -> bool {
        Rule::SignedIn.admits_request(self.role, true)
    }

    fn may_manage(&self) -> bool {
        Rule::Manage.admits(self.role)
    }

    fn may_administer(&self) -> bool {
        Rule::Administer.admits(self.role)
    }

    fn is_team(&self) -> bool {
        self.role != Role::Customer
    }

    fn role_word(&self) -> &'static str {
        match self.role {
            Role::Admin => "admin",
            Role::Operator => "operator",
            Role::ReadOnly => "read-only",
            Role::Customer => "customer",
        }
    }

    /// Sets the toast for `?done=…`, which form handlers redirect with. Unknown values are ignored, because anyone can
    /// write an address.
    fn with_done(mut self, done: &str, messages: &[(&str, &'static str)]) -> Self {
        self.toast = messages
            .iter()
            .find_map(|(word, message)| (*word == done).then_some(*message));
        self
    }

    fn menu(&self) -> impl Iterator<Item = &'static menu::Group> {
        let team = if self.is_team() { menu::TEAM } else { &[] };
        let admin = if self.role == Role::Admin {
            menu::ADMIN
        } else {
            &[]
        };
        menu::MENU.iter().chain(team).chain(admin)
    }
}

/// The query of a page that a form handler redirects to.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Done {
    done: String,
    /// The result of the form, which is shown once.
    result: String,
}

/// A delivery as a row of a list.
#[derive(Debug, Clone)]
struct DeliverySummary {
    id: String,
    event: String,
    event_type: String,
    tenant: String,
    /// The endpoint's public ID.
    endpoint: String,
    url: String,
    state: &'static str,
    attempts: i16,
    last_response: String,
    /// What has to happen before it is sent.
    on_hold_until: Option<&'static str>,
    created: Moment,
}

impl From<&Delivery> for DeliverySummary {
    fn from(delivery: &Delivery) -> Self {
        Self {
            id: delivery.id().to_string(),
            event: delivery.event(),
            event_type: delivery.event_type.clone(),
            tenant: delivery.tenant.clone(),
            endpoint: delivery.endpoint.clone(),
            url: delivery.url.clone(),
            state: delivery.state().as_str(),
            attempts: delivery.attempt_count,
            last_response: last_response(delivery),
            on_hold_until: delivery.hold().map(Hold::until),
            created: Moment(delivery.created_at()),
        }
    }
}

/// An ID with a button that copies it.
#[derive(Template)]
#[template(
    ext = "html",
    source = r#"<code>{{ id }}</code> <button type="button" class="copy with-script" data-copy>Copy<span class="visually-hidden"> {{ id }}</span></button>"#
)]
struct Copyable<'a> {
    id: &'a str,
}

/// Copies the text of the element before it.
#[derive(Template)]
#[template(
    ext = "html",
    source = r#"<button type="button" class="copy with-script" data-copy>Copy<span class="visually-hidden"> {{ id }}</span></button>"#
)]
struct CopyButton<'a> {
    id: &'a str,
}

fn copy_button(id: &str) -> Markup {
    Markup::of_part(&CopyButton { id })
}

/// For templates: `{{ crate::pages::copyable(line.event.as_str()) }}`.
fn copyable(id: &str) -> Markup {
    Markup::of_part(&Copyable { id })
}

/// The maximum size of a formatted body. Indentation can make a deeply nested body a hundred times larger.
const FORMATTED_BYTES_MAX: usize = 256 * 1024;

/// A formatted body, which may be truncated.
#[derive(Debug, Clone)]
struct Pretty {
    text: String,
    is_cut: bool,
}

impl Pretty {
    fn of(body: &str) -> Self {
        Self::within(body, FORMATTED_BYTES_MAX)
    }

    fn within(body: &str, bytes_max: usize) -> Self {
        let LaidOut { text, is_cut } = lay_out_within(body, bytes_max);
        Self { text, is_cut }
    }

    /// The formatted text, or the original where the formatted one would be truncated.
    fn whole(text: &str) -> String {
        match Self::of(text) {
            Self { is_cut: true, .. } => text.to_owned(),
            Self { text, .. } => text,
        }
    }
}

/// The maximum size of a body on a page, formatted and raw. The rest can be downloaded.
const BODY_SHOWN_BYTES_MAX: usize = 16 * 1024;

/// The body of an event as pages show it.
#[derive(Debug, Clone)]
struct ShownBody {
    /// The event's generated ID, by which the whole body is downloaded.
    event: String,
    pretty: Pretty,
    raw: String,
    /// Of the whole body.
    bytes: usize,
    is_cut: bool,
}

impl ShownBody {
    const KIB_MAX: usize = BODY_SHOWN_BYTES_MAX / 1024;

    fn of(event: EventId, body: &str) -> Self {
        let shown = &body[..body.floor_char_boundary(BODY_SHOWN_BYTES_MAX)];
        Self {
            event: event.generated(),
            pretty: Pretty::within(body, BODY_SHOWN_BYTES_MAX),
            raw: shown.to_owned(),
            bytes: body.len(),
            is_cut: shown.len() < body.len(),
        }
    }
}

/// Characters of a URL in a heading.
const HEADING_URL_CHARS_MAX: usize = 80;

/// The start and the end of a long URL, for headings. The page has all of it elsewhere.
fn shortened_url(url: &str) -> String {
    let count = url.chars().count();
    if count <= HEADING_URL_CHARS_MAX {
        return url.to_owned();
    }
    let end = HEADING_URL_CHARS_MAX / 4;
    let start: String = url.chars().take(HEADING_URL_CHARS_MAX - end - 1).collect();
    let rest: String = url.chars().skip(count - end).collect();
    format!("{start}…{rest}")
}

/// The result of the latest attempt: status code, error or outcome.
fn last_response(delivery: &Delivery) -> String {
    match (delivery.status, &delivery.error, delivery.outcome) {
        (Some(status), _, _) => status.to_string(),
        (None, Some(error), _) => error_summary(error),
        (None, None, Some(outcome)) => outcome_name(outcome).replace('_', " "),
        (None, None, None) => "not attempted yet".to_owned(),
    }
}

/// A point in time. In a template `{{ moment }}` renders a `<time>` element, which the script converts to the time zone of
/// the user.
#[derive(Debug, Clone, Copy)]
struct Moment(Option<DateTime<Utc>>);

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => Ok(()),
            Some(_) => write!(
                f,
                "<time datetime=\"{exact}\" title=\"{exact}\">{}</time>",
                self.text(),
                exact = self.exact()
            ),
        }
    }
}

/// It contains no external input.
impl HtmlSafe for Moment {}

/// For templates: `{{ row.created_at.when() }}`.
trait When {
    fn when(&self) -> Moment;
}

impl When for DateTime<Utc> {
    fn when(&self) -> Moment {
        Moment(Some(*self))
    }
}

impl When for Option<DateTime<Utc>> {
    fn when(&self) -> Moment {
        Moment(*self)
    }
}

impl Moment {
    fn text(&self) -> String {
        self.0
            .map(|time| time.format("%Y-%m-%d %H:%M:%S UTC").to_string())
            .unwrap_or_default()
    }

    fn exact(&self) -> String {
        self.0
            .map(|time| time.to_rfc3339_opts(SecondsFormat::Millis, true))
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_urls_are_shortened_in_the_middle() {
        assert_eq!(shortened_url("https://a.example/hook"), "https://a.example/hook");
        let short = shortened_url(&format!("https://a.example/{}/end", "ü".repeat(2_000)));
        assert_eq!(short.chars().count(), HEADING_URL_CHARS_MAX);
        assert!(short.starts_with("https://a.example/") && short.ends_with("/end") && short.contains('…'));
    }
}
