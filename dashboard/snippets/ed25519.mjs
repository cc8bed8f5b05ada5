import { createPublicKey, verify } from 'node:crypto';

const TOLERANCE_SECONDS = 300;

/** publicKey is whpk_…; the others are the headers Webhook-Id, Webhook-Timestamp and Webhook-Signature, and the raw body (Buffer). */
export function isGenuine(publicKey, id, timestamp, header, body, now = Date.now() / 1000) {
  if (!(Math.abs(now - Number(timestamp)) <= TOLERANCE_SECONDS)) return false;
  const raw = Buffer.from(publicKey.replace(/^whpk_/, ''), 'base64');
  const der = Buffer.concat([Buffer.from('302a300506032b6570032100', 'hex'), raw]);
  const key = createPublicKey({ key: der, format: 'der', type: 'spki' });
  const signed = Buffer.concat([Buffer.from(`${id}.${timestamp}.`), body]);
  return header.split(' ').some((part) => verify(null, signed, key, Buffer.from(part.replace(/^v1a,/, ''), 'base64')));
}
