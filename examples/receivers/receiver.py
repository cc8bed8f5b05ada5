#!/usr/bin/env python3
"""A complete webhook receiver using only Python's standard library.

    WEBHOOK_SECRET=whsec_... python3 receiver.py

It verifies the signature over the raw bytes, processes each event once however often it arrives, ignores stale sequence
numbers, and responds fast. During a rotation, set both secrets separated by a comma.
"""

import hashlib
import hmac
import json
import os
import re
import sqlite3
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRETS = [s.strip() for s in os.environ.get("WEBHOOK_SECRET", "").split(",") if s.strip()]
DATABASE = os.environ.get("WEBHOOK_DATABASE", "receiver.db")
TOLERANCE_SECONDS = 300
BODY_BYTES_MAX = 1024 * 1024
SIGNATURES_MAX = 10


def is_genuine(header, body, now):
    """Whether one of our secrets produced one of the signatures in `t=<unix>,v1=<hex>[,v1=<hex>]`, within the tolerance."""
    if not re.fullmatch(r"[!-~]{1,4096}", header):
        return False
    parts = [part.partition("=") for part in header.split(",")]
    times = [value for name, _, value in parts if name == "t"]
    given = [value for name, _, value in parts if name == "v1"]
    if len(times) != 1 or not re.fullmatch(r"[0-9]{1,12}", times[0]):
        return False
    if not 1 <= len(given) <= SIGNATURES_MAX or abs(now - int(times[0])) > TOLERANCE_SECONDS:
        return False
    signed = times[0].encode() + b"." + body
    expected = [hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest() for secret in SECRETS]
    # Every pair is compared in constant time.
    return any([hmac.compare_digest(a, b) for a in expected for b in given])


def handle(event):
    """Does the work and stores the event's id in one transaction. Returns what it did."""
    db = sqlite3.connect(DATABASE, timeout=10, isolation_level=None)
    try:
        db.execute("BEGIN IMMEDIATE")
        new = db.execute("INSERT INTO received (id) VALUES (?) ON CONFLICT DO NOTHING", (event["id"],)).rowcount
        if not new:
            return "seen before"
        # The work. Keep it this small: put anything slow into your own queue, in this transaction.
        changed = db.execute(
            """INSERT INTO invoices (id, status, sequence) VALUES (?, ?, ?)
               ON CONFLICT (id) DO UPDATE
               SET status = excluded.status, sequence = COALESCE(excluded.sequence, invoices.sequence)
               WHERE excluded.sequence IS NULL OR excluded.sequence > COALESCE(invoices.sequence, 0)""",
            (event["data"]["id"], event["type"], event.get("sequence")),
        ).rowcount
        db.execute("COMMIT")
        return "handled" if changed else "stale"
    finally:
        # Rolls back unless committed.
        db.close()


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > BODY_BYTES_MAX:
            self.close_connection = True
            return self.answer(413)
        body = self.rfile.read(int(length))
        if not is_genuine(self.headers.get("Webhook-Signature", ""), body, time.time()):
            return self.answer(401)
        try:
            event = json.loads(body)
            done = handle(event)
        except (ValueError, KeyError, TypeError):
            return self.answer(400)
        # Anything but 2xx is retried, so return 2xx for duplicates and stale events too.
        self.answer(204)
        # A single write, so that lines of concurrent requests do not mix.
        sys.stdout.write(f"{done} {event['id']}\n")
        sys.stdout.flush()

    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    if not SECRETS:
        raise SystemExit("WEBHOOK_SECRET is not set")
    with sqlite3.connect(DATABASE) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE IF NOT EXISTS received (id TEXT PRIMARY KEY)")
        db.execute("CREATE TABLE IF NOT EXISTS invoices (id TEXT PRIMARY KEY, status TEXT, sequence INTEGER)")
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "3000"))), Receiver)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
