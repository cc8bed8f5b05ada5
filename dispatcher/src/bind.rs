//! `query.bind_all((a, b, c))` is `query.bind(a).bind(b).bind(c)`.

use sqlx::{
    Encode, Postgres, Type,
    postgres::PgArguments,
    query::{Query, QueryAs, QueryScalar},
};

/// A statement that takes parameters.
pub trait BindAll<'q>: Sized {
    fn bind_one(self, value: impl Encode<'q, Postgres> + Type<Postgres> + 'q) -> Self;

    fn bind_all(self, values: impl Parameters<'q>) -> Self {
        values.bind_to(self)
    }
}

macro_rules! statements {
    ($($type:ty $(, $output:ident)?;)+) => {$(
        impl<'q $(, $output)?> BindAll<'q> for $type {
            fn bind_one(self, value: impl Encode<'q, Postgres> + Type<Postgres> + 'q) -> Self {
                self.bind(value)
            }
        }
    )+};
}
statements! {
    Query<'q, Postgres, PgArguments>;
    QueryAs<'q, Postgres, O, PgArguments>, O;
    QueryScalar<'q, Postgres, O, PgArguments>, O;
}

/// Values of consecutive parameters.
pub trait Parameters<'q> {
    fn bind_to<S: BindAll<'q>>(self, statement: S) -> S;
}

macro_rules! tuples {
    ($($($value:ident)+;)+) => {$(
        impl<'q, $($value: Encode<'q, Postgres> + Type<Postgres> + 'q),+> Parameters<'q> for ($($value,)+) {
            #[allow(non_snake_case, reason = "each value has the name of its type")]
            fn bind_to<S: BindAll<'q>>(self, statement: S) -> S {
                let ($($value,)+) = self;
                statement$(.bind_one($value))+
            }
        }
    )+};
}
tuples! {
    A B;
    A B C;
    A B C D;
    A B C D E;
    A B C D E F;
    A B C D E F G;
    A B C D E F G H;
}
