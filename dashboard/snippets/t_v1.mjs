import { createHmac, timingSafeEqual } from 'node:crypto';

const SECRETS = process.env.WEBHOOK_SECRET.split(','); // during a rotation: the new and the old secret
const TOLERANCE_SECONDS = 300;

/** header: the value of Webhook-Signature. body: the raw, unparsed bytes (Buffer). */
export function isGenuine(header, body, now = Date.now() / 1000) {
  const parts = header.split(',').map((part) => [part.slice(0, part.indexOf('=')), part.slice(part.indexOf('=') + 1)]);
  const times = parts.filter(([name]) => name === 't').map(([, value]) => value);
  const given = parts.filter(([name]) => name === 'v1').map(([, value]) => value);
  if (times.length !== 1 || !/^[0-9]+$/.test(times[0])) return false;
  if (Math.abs(now - Number(times[0])) > TOLERANCE_SECONDS) return false;
  return SECRETS.some((secret) => {
    const expected = createHmac('sha256', secret).update(`${times[0]}.`).update(body).digest('hex');
    return given.some((value) => value.length === 64 && timingSafeEqual(Buffer.from(expected), Buffer.from(value)));
  });
}
