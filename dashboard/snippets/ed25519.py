import base64
import time

from cryptography.exceptions import InvalidSignature  # pip install cryptography
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

TOLERANCE_SECONDS = 300


def is_genuine(public_key: str, event_id: str, timestamp: str, header: str, body: bytes, now: float | None = None) -> bool:
    """public_key is whpk_…; the others are the headers Webhook-Id, Webhook-Timestamp and Webhook-Signature, and the raw body."""
    if abs((time.time() if now is None else now) - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key.removeprefix("whpk_")))
    signed = f"{event_id}.{timestamp}.".encode() + body
    for part in header.split(" "):
        try:
            key.verify(base64.b64decode(part.removeprefix("v1a,")), signed)
            return True
        except InvalidSignature:
            continue
    return False
