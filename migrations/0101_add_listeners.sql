-- A temporary endpoint whose requests a person takes over a connection of the API. Its endpoint is paused: emits queue for
-- it, no dispatcher sends, and who holds the connection takes the queue rows. It ends when nobody has held it for a while.
create table postrider.listeners (
    endpoint_id int         primary key,
    holder      uuid,
    expires_at  timestamptz not null
);
create index listeners_expiry on postrider.listeners (expires_at);
