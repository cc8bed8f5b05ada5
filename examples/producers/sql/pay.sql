-- usage: psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -v tenant=acme -v invoice=inv_1 -f pay.sql
begin;
update invoices set paid = true where id = :'invoice';
select postrider.emit(
    tenant => :'tenant',
    type   => 'invoice.paid',
    data   => json_build_object('object', 'invoice', 'id', :'invoice')::text,
    id     => :'invoice' || ':paid'
);
commit;
