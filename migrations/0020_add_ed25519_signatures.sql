-- Standard Webhooks' asymmetric signatures: the receiver holds only a public key.
alter type postrider.signature_format add value 'standard-ed25519';

-- Of a key pair whose private half is sealed beside it. No secret, so that it can be shown without opening anything.
alter table postrider.secrets add column public_key text;

-- An endpoint has one current secret.
create unique index secrets_current on postrider.secrets (endpoint_id) where retires_at is null;
