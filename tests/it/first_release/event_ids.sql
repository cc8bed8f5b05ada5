-- Event ids are UUIDs of version 7: they start with the time in milliseconds, so that a range of ids is a range of time.

-- A new id. The microseconds follow the version, so that ids of one session sort in the order they were made.
create or replace function postrider.uuid_at(at timestamptz) returns uuid language sql volatile as $$
    select encode(
        int8send(
            (((date_part('epoch', at) * 1000000)::bigint / 1000) << 16) | (7 << 12)
            | ((date_part('epoch', at) * 1000000)::bigint % 1000 * 4096 / 1000))
            || substring(uuid_send(gen_random_uuid()) from 9),
        'hex')::uuid
$$;

-- The lowest id of an instant, for partition bounds and time filters.
create or replace function postrider.uuid_floor(at timestamptz) returns uuid language sql immutable as $$
    select (encode(int8send((extract(epoch from at) * 1000)::bigint << 16), 'hex') || '0000000000000000')::uuid
$$;

create or replace function postrider.uuid_time(id uuid) returns timestamptz language sql immutable as $$
    select timestamptz 'epoch'
        + ('x0000' || substring(encode(uuid_send(id), 'hex') for 12))::bit(64)::bigint * interval '1 millisecond'
$$;
