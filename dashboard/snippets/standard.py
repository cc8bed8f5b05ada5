import os

from standardwebhooks import Webhook, WebhookVerificationError  # pip install standardwebhooks

SECRETS = os.environ["WEBHOOK_SECRET"].split(",")  # while rotating: the new one and the old one


def is_genuine(headers: dict[str, str], body: bytes) -> bool:
    """headers: with webhook-id, webhook-timestamp and webhook-signature. body: the raw bytes."""
    for secret in SECRETS:
        try:
            Webhook(secret).verify(body, headers)
            return True
        except WebhookVerificationError:
            continue
    return False
