import { Webhook } from 'standardwebhooks'; // npm install standardwebhooks

const SECRETS = process.env.WEBHOOK_SECRET.split(','); // during a rotation: the new and the old secret

/** headers: must include webhook-id, webhook-timestamp and webhook-signature. body: the raw, unparsed body. */
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
