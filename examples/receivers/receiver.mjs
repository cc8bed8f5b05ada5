// A complete webhook receiver using only Node's standard library (Node 22.13 or newer, for node:sqlite).
//
//     WEBHOOK_SECRET=whsec_... node receiver.mjs
//
// It verifies the signature over the raw bytes, processes each event once however often it arrives, ignores stale sequence
// numbers, and responds fast. During a rotation, set both secrets separated by a comma.

import { createHmac, timingSafeEqual } from 'node:crypto';
import { createServer } from 'node:http';
import { DatabaseSync } from 'node:sqlite';

const SECRETS = (process.env.WEBHOOK_SECRET ?? '').split(',').map((s) => s.trim()).filter(Boolean);
const TOLERANCE_SECONDS = 300;
const BODY_BYTES_MAX = 1024 * 1024;
const SIGNATURES_MAX = 10;

if (SECRETS.length === 0) {
  console.error('WEBHOOK_SECRET is not set');
  process.exit(1);
}

/** Whether one of our secrets produced one of the signatures in `t=<unix>,v1=<hex>[,v1=<hex>]`, within the tolerance. */
function isGenuine(header, body, now) {
  if (!/^[!-~]{1,4096}$/.test(header)) return false;
  const parts = header.split(',').map((part) => [part.slice(0, part.indexOf('=')), part.slice(part.indexOf('=') + 1)]);
  const times = parts.filter(([name]) => name === 't').map(([, value]) => value);
  const given = parts.filter(([name]) => name === 'v1').map(([, value]) => value);
  if (times.length !== 1 || !/^[0-9]{1,12}$/.test(times[0])) return false;
  if (given.length < 1 || given.length > SIGNATURES_MAX) return false;
  if (!given.every((value) => /^[0-9a-f]{64}$/.test(value))) return false;
  if (Math.abs(now - Number(times[0])) > TOLERANCE_SECONDS) return false;
  return SECRETS.some((secret) => {
    const expected = createHmac('sha256', secret).update(`${times[0]}.`).update(body).digest();
    return given.some((value) => timingSafeEqual(expected, Buffer.from(value, 'hex')));
  });
}

const db = new DatabaseSync(process.env.WEBHOOK_DATABASE ?? 'receiver.db');
db.exec('PRAGMA journal_mode = WAL');
db.exec('CREATE TABLE IF NOT EXISTS received (id TEXT PRIMARY KEY)');
db.exec('CREATE TABLE IF NOT EXISTS invoices (id TEXT PRIMARY KEY, status TEXT, sequence INTEGER)');
const remember = db.prepare('INSERT INTO received (id) VALUES (?) ON CONFLICT DO NOTHING');
const work = db.prepare(
  `INSERT INTO invoices (id, status, sequence) VALUES (?, ?, ?)
   ON CONFLICT (id) DO UPDATE
   SET status = excluded.status, sequence = COALESCE(excluded.sequence, invoices.sequence)
   WHERE excluded.sequence IS NULL OR excluded.sequence > COALESCE(invoices.sequence, 0)`,
);

/** Does the work and stores the event's id in one transaction. Returns what it did. */
function handle(event) {
  db.exec('BEGIN IMMEDIATE');
  try {
    let done = 'seen before';
    if (remember.run(event.id).changes === 1) {
      // The work. Keep it this small: put anything slow into your own queue, in this transaction.
      const { changes } = work.run(event.data.id, event.type, event.sequence ?? null);
      done = changes === 1 ? 'handled' : 'stale';
    }
    db.exec('COMMIT');
    return done;
  } catch (error) {
    db.exec('ROLLBACK');
    throw error;
  }
}

/** The raw body, or undefined if it is too large. */
async function read(request) {
  const chunks = [];
  let size = 0;
  for await (const chunk of request) {
    size += chunk.length;
    if (size > BODY_BYTES_MAX) return undefined;
    chunks.push(chunk);
  }
  return Buffer.concat(chunks);
}

const server = createServer(async (request, response) => {
  const answer = (status) => response.writeHead(status, { connection: status === 413 ? 'close' : 'keep-alive' }).end();
  try {
    const body = await read(request);
    if (body === undefined) return answer(413);
    if (!isGenuine(request.headers['webhook-signature'] ?? '', body, Date.now() / 1000)) return answer(401);
    const event = JSON.parse(body);
    const done = handle(event);
    // Anything but 2xx is retried, so return 2xx for duplicates and stale events too.
    answer(204);
    console.log(done, event.id);
  } catch (error) {
    // Malformed input will never succeed; everything else is worth a retry.
    answer(error instanceof SyntaxError || error instanceof TypeError ? 400 : 503);
  }
});
server.listen(Number(process.env.PORT ?? 3000), '127.0.0.1', () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
