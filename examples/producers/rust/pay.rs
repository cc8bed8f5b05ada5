//! Marks an invoice as paid and emits the event, in one transaction. The crate also validates the data against the type's
//! schema.

// This program has no settings of its own: everything comes from the environment.
#![allow(clippy::disallowed_methods)]

use std::env;

use anyhow::Context;
use postrider_sender::{Emitter, NewEvent};
use sqlx::{Connection, PgConnection};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (database, tenant, invoice) = (
        env::var("DATABASE_URL").context("DATABASE_URL")?,
        env::var("TENANT").context("TENANT")?,
        env::var("INVOICE").context("INVOICE")?,
    );
    // One per database: it caches compiled schemas.
    let emitter = Emitter::default();
    let mut connection = PgConnection::connect(&database).await?;

    let mut transaction = connection.begin().await?;
    sqlx::query("update invoices set paid = true where id = $1")
        .bind(&invoice)
        .execute(&mut *transaction)
        .await?;
    let (id, data) = (
        format!("{invoice}:paid"),
        serde_json::json!({"object": "invoice", "id": invoice}).to_string(),
    );
    let event = NewEvent::new(&tenant, "invoice.paid", &data).id(id.as_str());
    let emitted = emitter.emit(&mut transaction, &event).await?;
    if env::var_os("ROLL_BACK").is_some() {
        transaction.rollback().await?;
    } else {
        transaction.commit().await?;
    }
    println!("{}", emitted.id);
    Ok(())
}
