//! `events tail`: a tenant's events as they arrive, the newest at the bottom.
//! Invariant: an event that is committed late is shown too, as long as it is among the newest that one poll fetches.

use std::{
    collections::{HashSet, VecDeque},
    process::ExitCode,
    time::Duration,
};

use clap::{Args, Subcommand};
use postrider_client::{Client, Event, PageOf};

use crate::{
    output::{SOFT, STRONG, json_line, stop_signal},
    reach::{Failure, InTenant},
    settings::Environment,
};

const POLL_INTERVAL: Duration = Duration::from_millis(500);
const POLL_LIMIT: u32 = 200;
/// More than one poll fetches, so that no event is shown twice.
const REMEMBERED_MAX: usize = 4 * POLL_LIMIT as usize;

#[derive(Subcommand)]
pub enum EventsCommand {
    /// Show events as they arrive, until stopped
    Tail(TailArguments),
}

#[derive(Args)]
pub struct TailArguments {
    /// Number of existing events to show first
    #[arg(long, short = 'n', default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=i64::from(POLL_LIMIT)))]
    lines: u32,
    /// Only this event type; invoice.* matches every type starting with invoice.
    #[arg(long = "type")]
    type_name: Option<String>,
    /// Exit after the existing events
    #[arg(long)]
    no_follow: bool,
    #[command(flatten)]
    at: InTenant,
}

pub(crate) async fn run(command: EventsCommand, environment: &Environment) -> Result<ExitCode, Failure> {
    let EventsCommand::Tail(arguments) = &command;
    tail(arguments, environment)
        .await
        .map_err(|error| arguments.at.reach.failure(error))
}

async fn tail(arguments: &TailArguments, environment: &Environment) -> anyhow::Result<ExitCode> {
    let (client, tenant) = arguments.at.open(environment).await?;
    let mut seen = Seen::default();
    let mut first = true;
    // Shared by all polls: a signal that arrives during a request is handled after it.
    let mut stop = std::pin::pin!(stop_signal());
    loop {
        let mut new = poll(&client, &tenant, &mut seen).await?;
        new.retain(|event| wants(arguments.type_name.as_deref(), &event.r#type));
        if first {
            new.drain(..new.len().saturating_sub(arguments.lines as usize));
        }
        first = false;
        for event in new {
            show(&event, arguments.at.reach.json);
        }
        if arguments.no_follow {
            return Ok(ExitCode::SUCCESS);
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            () = &mut stop => return Ok(ExitCode::SUCCESS),
        }
    }
}

/// Events not seen before, oldest first.
async fn poll(client: &Client, tenant: &str, seen: &mut Seen) -> anyhow::Result<Vec<Event>> {
    let page = client.events(tenant, &PageOf::limit(POLL_LIMIT)).await?;
    let mut new: Vec<Event> = page
        .data
        .into_iter()
        .filter(|event| seen.is_new(&event.id))
        .collect();
    new.reverse();
    Ok(new)
}

#[derive(Default)]
struct Seen {
    ids: HashSet<String>,
    order: VecDeque<String>,
}

impl Seen {
    fn is_new(&mut self, id: &str) -> bool {
        if !self.ids.insert(id.to_owned()) {
            return false;
        }
        self.order.push_back(id.to_owned());
        if self.order.len() > REMEMBERED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        true
    }
}

fn wants(pattern: Option<&str>, type_name: &str) -> bool {
    match pattern {
        None | Some("*") => true,
        Some(pattern) => match pattern.strip_suffix(".*") {
            Some(prefix) => type_name
                .strip_prefix(prefix)
                .is_some_and(|rest| rest.starts_with('.')),
            None => type_name == pattern,
        },
    }
}

fn show(event: &Event, json: bool) {
    if json {
        json_line(event);
        return;
    }
    let data = event.data.as_ref().map_or("", |data| data.get());
    let end = data.char_indices().nth(120).map_or(data.len(), |(end, _)| end);
    anstream::println!(
        "{SOFT}{}{SOFT:#} {STRONG}{}{STRONG:#} {} {SOFT}{}{SOFT:#}",
        event.created_at.format("%H:%M:%S%.3f"),
        event.r#type,
        event.id,
        printable(&data[..end])
    );
}

/// Without control characters, which could manipulate the terminal.
fn printable(text: &str) -> String {
    let is_unsafe =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.replace(is_unsafe, "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_shown_as_it_is_but_for_what_steers_the_terminal() {
        assert_eq!(printable("{\"a\":\"ż\"}"), "{\"a\":\"ż\"}");
        assert_eq!(printable("\u{1b}[31m\u{202e}"), "\u{fffd}[31m\u{fffd}");
    }

    #[test]
    fn a_type_or_all_below_it() {
        assert!(
            wants(None, "a.b")
                && wants(Some("*"), "a.b")
                && wants(Some("a.*"), "a.b")
                && wants(Some("a.b"), "a.b")
        );
        assert!(!wants(Some("a"), "a.b") && !wants(Some("a.*"), "ab.c") && !wants(Some("a.*"), "a"));
    }

    #[test]
    fn what_was_shown_is_not_shown_again() {
        let mut seen = Seen::default();
        assert!(seen.is_new("a") && !seen.is_new("a"));
        for n in 0..REMEMBERED_MAX {
            seen.is_new(&n.to_string());
        }
        assert_eq!(seen.ids.len(), seen.order.len());
        assert!(seen.ids.len() <= REMEMBERED_MAX);
    }
}
