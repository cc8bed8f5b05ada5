-- Events for one cell that became visible, in the order of their numbers, which is that of the commits for each key: those of a
-- transaction are not enough, because a transaction that began earlier may commit later.
-- As in the tail of the queue, one index scan for each range of transactions: rows that were deleted are not scanned again, even
-- while an old snapshot keeps them. `offset 0` leaves the scan no other index.
-- $1 the cell, $2 and $3 the ranges, $4 the last number read, $5 limit.
select o.n, o.bytes from unnest($2::xid8[], $3::xid8[]) as r (low, high)
cross join lateral (
    select o.n, octet_length(o.data) as bytes from postrider.cell_outbox o
    where o.cell_id = $1 and o.xid >= r.low and o.xid < r.high
    offset 0
) o
where o.n > $4
order by o.n limit $5
