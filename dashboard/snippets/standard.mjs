import { Webhook } from 'standardwebhooks'; // npm install standardwebhooks

const SECRETS = process.env.WEBHOOK_SECRET.split(','); // while rotating: the new one and the old one

/** headers: with webhook-id, webhook-timestamp and webhook-signature. body: the raw body. */
export function isGenuine(headers, body) {
  return SECRETS.some((secret) => {
    try {
      new Webhook(secret).verify(body, headers);
      return true;
    } catch {
      return false;
    }
  });
}
