"""Marks an invoice as paid and emits the event, in one transaction."""

import json
import os

import psycopg

invoice = os.environ["INVOICE"]

with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
    # Leaving the block commits; an exception rolls back everything, including the event.
    with connection.transaction() as transaction:
        connection.execute("update invoices set paid = true where id = %s", (invoice,))
        (event_id,) = connection.execute(
            "select postrider.emit(tenant => %s, type => %s, data => %s, id => %s)",
            (
                os.environ["TENANT"],
                "invoice.paid",
                json.dumps({"object": "invoice", "id": invoice}),
                f"{invoice}:paid",
            ),
        ).fetchone()
        if os.environ.get("ROLL_BACK"):
            raise psycopg.Rollback(transaction)

print(event_id)
