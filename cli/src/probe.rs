//! `probe`: tests a receiver's implementation and prints a score. Status 0 when no check failed.

use std::process::ExitCode;

use clap::Args;
use postrider_client::{ProbeFinding, ProbeReport, Verdict};

use crate::{
    endpoints::find,
    output::{BAD, GOOD, SOFT, STRONG, WARNING, show, spinner},
    reach::{Failure, InTenant},
    settings::Environment,
};

#[derive(Args)]
pub struct ProbeArguments {
    /// URL or id of a registered endpoint
    #[arg(value_name = "URL")]
    endpoint: String,
    /// Event type of the test events [default: the first the endpoint subscribes to]
    #[arg(long = "type")]
    type_name: Option<String>,
    #[command(flatten)]
    at: InTenant,
}

pub(crate) async fn run(arguments: ProbeArguments, environment: &Environment) -> Result<ExitCode, Failure> {
    probe(&arguments, environment)
        .await
        .map_err(|error| arguments.at.reach.failure(error))
}

async fn probe(arguments: &ProbeArguments, environment: &Environment) -> anyhow::Result<ExitCode> {
    let (client, tenant) = arguments.at.open(environment).await?;
    let endpoint = find(&client, &tenant, &arguments.endpoint).await?;
    let waiting = spinner("probing");
    let report = client
        .probe_endpoint(&tenant, &endpoint.id, arguments.type_name.as_deref())
        .await;
    waiting.finish_and_clear();
    let report = report?;
    show(arguments.at.reach.json, &report, || show_report(&report));
    Ok(match report.passed {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn show_report(report: &ProbeReport) {
    anstream::println!(
        "{STRONG}{}{STRONG:#} {SOFT}{}{SOFT:#}\n",
        report.url,
        report.endpoint
    );
    for finding in &report.checks {
        show_finding(finding);
    }
    let style = if report.passed { GOOD } else { BAD };
    anstream::println!(
        "\n{style}Score: {} of 100{style:#} {SOFT}{} requests in {:.1} s{SOFT:#}",
        report.score,
        report.requests,
        report.duration_ms as f64 / 1000.0
    );
}

/// A check that did not pass also says why it matters and how to fix it.
fn show_finding(finding: &ProbeFinding) {
    let (style, sign) = match finding.verdict {
        Verdict::Pass => (GOOD, "✓"),
        Verdict::Warning => (WARNING, "!"),
        Verdict::Fail => (BAD, "✗"),
        Verdict::Skipped => (SOFT, "-"),
    };
    anstream::println!(
        "{style}{sign} {}{style:#} {SOFT}{}{SOFT:#}",
        finding.title,
        finding.found
    );
    if matches!(finding.verdict, Verdict::Warning | Verdict::Fail) {
        anstream::println!("    {}\n    {STRONG}{}{STRONG:#}", finding.meaning, finding.fix);
    }
}
