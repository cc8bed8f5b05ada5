-- Requests with an Idempotency-Key that run without a transaction open, because they wait for somebody else's server. A
-- row is there while its request runs; that of one that was killed counts for nothing after its time.
create table postrider.idempotency_claims (
    scope      bytea primary key,
    expires_at timestamptz not null
);
