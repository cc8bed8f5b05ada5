-- A dispatcher that is stopping still owns what it has on the wire, but no share of the rest: the others take what it gives
-- back at once, and do not wait until it is gone.
alter table postrider.dispatchers add column leaving boolean not null default false;
