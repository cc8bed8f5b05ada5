//! The way people of the team sign in: a login and a password. Whoever adds single sign-on adds it here: everything
//! after `identify` asks only for the person that came out of it.

use std::{net::IpAddr, time::Duration};

use super::{Actor, Session, password, throttle};
use crate::{
    Shared,
    audit::{self, Action, Entry},
    problem::{Kind, Problem},
    tables::{self, people},
};

const LOGIN_BYTES_MAX: usize = 256;

pub(crate) enum SignIn {
    /// The token that the session's cookie carries.
    Done(String),
    /// The login or the password: which of the two is not told.
    Wrong,
    TooOften(Duration),
}

/// Takes the same time and the same tries whether or not there is such a login.
pub(crate) async fn sign_in(
    app: &Shared,
    address: Option<IpAddr>,
    login: &str,
    password: &str,
) -> Result<SignIn, Problem> {
    if let Err(wait) = throttle::take(login, address) {
        return Ok(SignIn::TooOften(wait));
    }
    let Some(person) = identify(app, login, password).await? else {
        return Ok(SignIn::Wrong);
    };
    let mut transaction = tables::begin(&app.pool).await?;
    let token = Session::begin_for_person(&mut transaction, person).await?;
    let entry = Entry {
        actor: &Actor(format!("person:{login}")),
        action: Action::SignedIn,
        tenant: None,
        subject: login,
        detail: None,
    };
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(SignIn::Done(token))
}

/// The number of the person who has this login and this password.
async fn identify(app: &Shared, login: &str, password: &str) -> Result<Option<i32>, Problem> {
    let is_possible = login.len() <= LOGIN_BYTES_MAX && !login.contains('\0');
    let person = match is_possible {
        true => people::find(&app.pool, login).await?,
        false => None,
    };
    let hash = person.as_ref().map(|person| person.password_hash.as_str());
    let is_right = password::verify(hash, password).await.map_err(|error| {
        tracing::error!(%error, "a password could not be checked");
        Problem::new(Kind::Internal, "It has been logged.")
    })?;
    Ok(person.filter(|_| is_right).map(|person| person.id))
}
