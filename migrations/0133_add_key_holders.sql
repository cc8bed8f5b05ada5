-- Which master keys the running roles hold, by name (the first bytes of a hash of each, which every sealed value begins
-- with): a change of the master key must not lock one of them out. A row is renewed while its process runs.
create table postrider.key_holders (
    id         uuid primary key,
    role       text not null,
    name       text not null,
    keys       bytea[] not null,
    heard_at   timestamptz not null,
    expires_at timestamptz not null
) with (fillfactor = 50);
