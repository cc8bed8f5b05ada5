//! The way people of the team sign in: a login and a password. Whoever adds single sign-on adds it here: everything
//! after `identify` asks only for the person that came out of it.

use std::{net::IpAddr, time::Duration};

use serde_json::json;

use super::{Actor, Session, failures, password, throttle};
use crate::{
    Shared,
    audit::{self, Action, Entry},
    problem::{Kind, Problem},
    tables::{self, people},
};

const LOGIN_BYTES_MAX: usize = 256;
/// For those who come while too many others wait.
const CROWD_PAUSE: Duration = Duration::from_secs(1);

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
    let attempt = match throttle::begin(login, address) {
        Ok(attempt) => attempt,
        Err(wait) => return Ok(SignIn::TooOften(wait)),
    };
    let Some(place) = password::queue(address) else {
        attempt.withdrawn();
        return Ok(SignIn::TooOften(CROWD_PAUSE));
    };
    let identified = match identify(app, place, login, password).await {
        Ok(identified) => identified,
        Err(problem) => {
            attempt.withdrawn();
            return Err(problem);
        }
    };
    let person = match identified {
        Identified::Person(id) => id,
        Identified::WrongPassword | Identified::Nobody => {
            let known = matches!(identified, Identified::WrongPassword).then_some(login);
            failures::note(app, known, address).await;
            return Ok(SignIn::Wrong);
        }
    };
    attempt.succeeded();
    let mut transaction = tables::begin(&app.pool).await?;
    let token = Session::begin_for_person(&mut transaction, person).await?;
    let entry = Entry {
        actor: &Actor(format!("person:{login}")),
        action: Action::SignedIn,
        tenant: None,
        subject: login,
        detail: Some(json!({"address": address})),
    };
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(SignIn::Done(token))
}

enum Identified {
    /// By their number.
    Person(i32),
    WrongPassword,
    Nobody,
}

/// The person who has this login and this password.
async fn identify(
    app: &Shared,
    place: password::Place,
    login: &str,
    password: &str,
) -> Result<Identified, Problem> {
    let is_possible = login.len() <= LOGIN_BYTES_MAX && !login.contains('\0');
    let person = match is_possible {
        true => people::find(&app.pool, login).await?,
        false => None,
    };
    let hash = person.as_ref().map(|person| person.password_hash.as_str());
    let is_right = place.verify(hash, password).await.map_err(|error| {
        tracing::error!(%error, "a password could not be checked");
        Problem::new(Kind::Internal, "It has been logged.")
    })?;
    Ok(match person {
        Some(person) if is_right => Identified::Person(person.id),
        Some(_) => Identified::WrongPassword,
        None => Identified::Nobody,
    })
}
