import os

from standardwebhooks import Webhook, WebhookVerificationError  # pip install standardwebhooks

SECRETS = os.environ["WEBHOOK_SECRET"].split(",")  # during a rotation: the new and the old secret


def is_genuine(headers: dict[str, str], body: bytes) -> bool:
    """headers: must include webhook-id, webhook-timestamp and webhook-signature. body: the raw, unparsed bytes."""
    for secret in SECRETS:
        try:
            Webhook(secret).verify(body, headers)
            return True
        except WebhookVerificationError:
            continue
    return False
