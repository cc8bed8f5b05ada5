-- The answers to requests that came with an Idempotency-Key. A row is written in the transaction of the request's work,
-- so that it is there if and only if the work is. While that transaction runs, an advisory lock on the scope is held.
create table postrider.idempotency (
    scope       bytea primary key,        -- sha-256 of the API key's id, the path and the Idempotency-Key
    fingerprint bytea not null,           -- sha-256 of the body
    status      smallint not null,
    answer      bytea not null,           -- encrypted: some answers hold a secret
    created_at  timestamptz not null default clock_timestamp()
);
create index idempotency_age on postrider.idempotency (created_at);
