import hashlib
import hmac
import os
import time

SECRETS = os.environ["WEBHOOK_SECRET"].split(",")  # during a rotation: the new and the old secret
TOLERANCE_SECONDS = 300


def is_genuine(header: str, body: bytes, now: float | None = None) -> bool:
    """header: the value of Webhook-Signature. body: the raw, unparsed bytes."""
    parts = [part.partition("=") for part in header.split(",")]
    times = [value for name, _, value in parts if name == "t"]
    given = [value for name, _, value in parts if name == "v1"]
    if len(times) != 1 or not times[0].isdigit() or not given:
        return False
    if abs((time.time() if now is None else now) - int(times[0])) > TOLERANCE_SECONDS:
        return False
    signed = times[0].encode() + b"." + body
    expected = [hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest() for secret in SECRETS]
    return any([hmac.compare_digest(a, b) for a in expected for b in given])
