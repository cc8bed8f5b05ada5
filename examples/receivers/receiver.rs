//! A complete webhook receiver with axum and Postgres.
//!
//! ```sh
//! WEBHOOK_SECRET=whsec_... WEBHOOK_DATABASE=postgresql://localhost/shop cargo run --example receiver
//! ```
//!
//! It verifies the signature over the raw bytes, processes each event once however often it arrives, ignores stale sequence
//! numbers, and responds fast. During a rotation, set both secrets separated by a comma.

// This program has no settings of its own: everything comes from the environment.
#![allow(clippy::disallowed_methods)]

use std::{env, sync::Arc, time::SystemTime};

use anyhow::{Context, bail};
use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State},
    http::{HeaderMap, StatusCode},
    routing::post,
};
use postrider_proto::signature::{Secret, verify};
use serde::Deserialize;
use sqlx::PgPool;
use tokio::net::TcpListener;

const BODY_BYTES_MAX: usize = 1024 * 1024;

#[derive(Deserialize)]
struct Event {
    id: String,
    r#type: String,
    sequence: Option<i64>,
    data: Invoice,
}

#[derive(Deserialize)]
struct Invoice {
    id: String,
}

struct Receiver {
    secrets: Vec<Secret>,
    pool: PgPool,
}

/// `Bytes`, not `Json`: the signature covers the raw body.
async fn receive(State(receiver): State<Arc<Receiver>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let header = headers
        .get("webhook-signature")
        .and_then(|value| value.to_str().ok());
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    if verify(header.unwrap_or_default(), &body, &receiver.secrets, now as i64).is_err() {
        return StatusCode::UNAUTHORIZED;
    }
    let Ok(event) = serde_json::from_slice::<Event>(&body) else {
        return StatusCode::BAD_REQUEST;
    };
    match handle(&receiver.pool, &event).await {
        // Anything but 2xx is retried, so return 2xx for duplicates and stale events too.
        Ok(done) => {
            println!("{done} {}", event.id);
            StatusCode::NO_CONTENT
        }
        Err(error) => {
            eprintln!("could not process {}, it will be retried: {error}", event.id);
            StatusCode::SERVICE_UNAVAILABLE
        }
    }
}

/// Does the work and stores the event's id in one transaction. Returns what it did.
async fn handle(pool: &PgPool, event: &Event) -> Result<&'static str, sqlx::Error> {
    let mut tx = pool.begin().await?;
    let new = sqlx::query("insert into received (id) values ($1) on conflict do nothing")
        .bind(&event.id)
        .execute(&mut *tx)
        .await?;
    if new.rows_affected() == 0 {
        return Ok("seen before");
    }
    // The work. Keep it this small: put anything slow into your own queue, in this transaction.
    let changed = sqlx::query(
        "insert into invoices (id, status, sequence) values ($1, $2, $3)
         on conflict (id) do update
         set status = excluded.status, sequence = coalesce(excluded.sequence, invoices.sequence)
         where excluded.sequence is null or excluded.sequence > coalesce(invoices.sequence, 0)",
    )
    .bind(&event.data.id)
    .bind(&event.r#type)
    .bind(event.sequence)
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(match changed.rows_affected() {
        0 => "stale",
        _ => "handled",
    })
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let secrets = env::var("WEBHOOK_SECRET").unwrap_or_default();
    let secrets: Vec<Secret> = secrets
        .split(',')
        .map(str::trim)
        .filter(|secret| !secret.is_empty())
        .map(Secret::new)
        .collect();
    if secrets.is_empty() {
        bail!("WEBHOOK_SECRET is not set");
    }
    let database = env::var("WEBHOOK_DATABASE").context("WEBHOOK_DATABASE is not set")?;
    let pool = PgPool::connect(&database).await?;
    for table in [
        "create table if not exists received (id text primary key)",
        "create table if not exists invoices (id text primary key, status text, sequence bigint)",
    ] {
        sqlx::query(table).execute(&pool).await?;
    }
    let port = env::var("PORT").unwrap_or_else(|_| "3000".to_owned());
    let listener = TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let routes = Router::new()
        .route("/hook", post(receive))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(Arc::new(Receiver { secrets, pool }));
    axum::serve(listener, routes).await?;
    Ok(())
}
