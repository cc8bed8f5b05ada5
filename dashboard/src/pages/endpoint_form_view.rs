//! What the form of an endpoint shows beside its fields: the choice of event types, what applies to empty fields, what is
//! stored encrypted, and the result of testing the filter.

use postrider_proto::api::TlsFingerprints;

use super::{
    FormErrors,
    endpoint_form::{Fields, Number},
    type_picker::TypePicker,
};
use crate::{
    actions::{
        attempt_view::custom_header_names,
        endpoints::{
            certificates,
            rules::write_wait,
            subscriptions::{EVENTS_SEARCHED_MAX, FilterTest},
        },
    },
    auth::Visit,
    http::problem::Problem,
    pages::stats_format::{counted, grouped},
    tables::endpoints::EndpointRow,
};

pub(super) struct FormView {
    /// Where the form is sent.
    pub(super) action: String,
    pub(super) fields: Fields,
    pub(super) errors: FormErrors,
    pub(super) picker: TypePicker,
    /// Chosen types that do not exist, which have to be confirmed.
    pub(super) unmatched: Vec<String>,
    pub(super) filter_test: Option<FilterTest>,
    pub(super) numbers: [Number; 3],
    /// The schedule of an endpoint without its own.
    pub(super) default_schedule: String,
    /// Names of the custom headers that are set.
    pub(super) header_names: Vec<String>,
    pub(super) tls: Option<TlsFingerprints>,
}

impl FormView {
    /// `stored` is the endpoint, unless it is a new one.
    pub(super) async fn load(
        visit: &Visit,
        fields: Fields,
        stored: Option<&EndpointRow>,
    ) -> Result<Self, Problem> {
        let app = &visit.app;
        let waits = app.defaults.schedule.waits().iter();
        let waits = waits.map(|wait| write_wait(i32::try_from(wait.as_millis()).unwrap_or(i32::MAX)));
        Ok(Self {
            action: match stored {
                Some(row) => format!("/endpoints/{}/settings", row.public_id),
                None => "/endpoints".to_owned(),
            },
            picker: TypePicker::load(&app.pool, &fields.patterns()).await?,
            numbers: fields.numbers(&app.defaults),
            default_schedule: waits.collect::<Vec<_>>().join(", "),
            header_names: stored.map_or(Vec::new(), |row| custom_header_names(&app.vault, row)),
            tls: stored.and_then(|row| certificates::shown(&app.vault, row)),
            errors: FormErrors::default(),
            unmatched: Vec::new(),
            filter_test: None,
            fields,
        })
    }

    /// The result of a test in one line.
    pub(super) fn summary(&self, test: &FilterTest) -> String {
        let (admitted, tested) = (test.admitted(), test.events.len());
        let events = |count| counted(count, "event", "events");
        match (tested, admitted) {
            (0, _) => format!(
                "There is nothing to test with: none of the latest {} events is of these types.",
                grouped(EVENTS_SEARCHED_MAX)
            ),
            (1, 1) => "The latest event of these types would be sent.".to_owned(),
            (1, _) => "The latest event of these types would not be sent.".to_owned(),
            (_, 0) => format!(
                "None of the latest {} of these types would be sent.",
                events(tested)
            ),
            (tested, admitted) if tested == admitted => {
                format!(
                    "All of the latest {} of these types would be sent.",
                    events(tested)
                )
            }
            _ => format!(
                "{} of the latest {} of these types would be sent.",
                grouped(admitted),
                events(tested)
            ),
        }
    }
}
