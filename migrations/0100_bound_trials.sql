-- How many test events and probes an endpoint got lately: their number is bounded over all processes.
create table postrider.trials (
    endpoint_id int         not null,
    kind        text        not null check (kind in ('test', 'probe')),
    since       timestamptz not null,
    used        int         not null,
    primary key (endpoint_id, kind)
);
