// Has the npm libraries, and Node's own ed25519, judge requests: one JSON object a line. Prints those where they and the
// line disagree.
const crypto = require('node:crypto');
const fs = require('node:fs');
const { Webhook, WebhookVerificationError } = require('standardwebhooks');
const Stripe = require('stripe');

function accepts(test, body) {
  if (test.format === 't-v1') {
    try {
      Stripe.webhooks.constructEvent(body, test.signature, test.secret, 300);
      return true;
    } catch (error) {
      if (error.type === 'StripeSignatureVerificationError') return false;
      throw error;
    }
  }
  if (test.format === 'standard-ed25519') {
    const x = Buffer.from(test.secret.slice('whpk_'.length), 'base64').toString('base64url');
    const key = crypto.createPublicKey({ key: { kty: 'OKP', crv: 'Ed25519', x }, format: 'jwk' });
    const content = Buffer.concat([Buffer.from(`${test.id}.${test.timestamp}.`), body]);
    return test.signature
      .split(' ')
      .map((part) => part.split(','))
      .some(([version, text]) => version === 'v1a' && crypto.verify(null, content, key, Buffer.from(text, 'base64')));
  }
  try {
    new Webhook(test.secret).verify(body, {
      'webhook-id': test.id,
      'webhook-timestamp': test.timestamp,
      'webhook-signature': test.signature,
    });
    return true;
  } catch (error) {
    if (error instanceof WebhookVerificationError) return false;
    throw error;
  }
}

let judged = 0;
for (const line of fs.readFileSync(process.argv[2], 'utf8').split('\n')) {
  if (!line) continue;
  const test = JSON.parse(line);
  judged += 1;
  if (accepts(test, Buffer.from(test.body, 'base64')) !== test.valid) {
    console.log('node', test.format, 'disagrees about', test.name);
  }
}
console.log('judged', judged);
