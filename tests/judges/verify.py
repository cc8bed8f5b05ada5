"""Has the PyPI libraries judge requests: one JSON object a line. Prints those where they and the line disagree."""

import base64
import json
import sys

import standardwebhooks
import stripe


def accepts(case, body):
    if case["format"] == "t-v1":
        try:
            stripe.WebhookSignature.verify_header(
                body.decode(), case["signature"], case["secret"], tolerance=300
            )
            return True
        except stripe.SignatureVerificationError:
            return False
    headers = {
        "webhook-id": case["id"],
        "webhook-timestamp": case["timestamp"],
        "webhook-signature": case["signature"],
    }
    try:
        standardwebhooks.Webhook(case["secret"]).verify(body, headers)
        return True
    except standardwebhooks.WebhookVerificationError:
        return False


judged = 0
for line in open(sys.argv[1], encoding="utf-8"):
    case = json.loads(line)
    if case["format"] == "standard-ed25519":
        continue
    judged += 1
    if accepts(case, base64.b64decode(case["body"])) != case["valid"]:
        print("python", case["format"], "disagrees about", case["name"])
print("judged", judged)
