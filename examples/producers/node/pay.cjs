// Marks an invoice as paid and emits the event, in one transaction.
const { Client } = require("pg");

async function main() {
  const invoice = process.env.INVOICE;
  const client = new Client({ connectionString: process.env.DATABASE_URL });
  await client.connect();
  try {
    await client.query("begin");
    await client.query("update invoices set paid = true where id = $1", [invoice]);
    const { rows } = await client.query(
      "select postrider.emit(tenant => $1, type => $2, data => $3, id => $4) as id",
      [
        process.env.TENANT,
        "invoice.paid",
        JSON.stringify({ object: "invoice", id: invoice }),
        `${invoice}:paid`,
      ],
    );
    await client.query(process.env.ROLL_BACK ? "rollback" : "commit");
    console.log(rows[0].id);
  } finally {
    // After an error, closing the connection rolls back the transaction.
    await client.end();
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
