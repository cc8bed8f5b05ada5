//! Sign-in of team members with login and password. Single sign-on belongs here too: everything after `identify`
//! needs only the person it returns.

use std::{net::IpAddr, time::Duration};

use serde_json::json;

use super::{Actor, Session, failures, password, throttle};
use crate::{
    Shared,
    http::problem::Problem,
    tables::{
        self,
        audit::{self, Action, Entry},
        people,
    },
};

const LOGIN_BYTES_MAX: usize = 256;
/// Retry delay when too many others are waiting.
const CROWD_PAUSE: Duration = Duration::from_secs(1);

pub(crate) enum SignIn {
    /// The token for the session's cookie.
    Done(String),
    /// Login or password is wrong; which one is not disclosed.
    Wrong,
    TooOften(Duration),
}

/// Takes the same time and uses the same quota whether or not the login exists.
pub(crate) async fn sign_in(
    app: &Shared,
    address: Option<IpAddr>,
    login: &str,
    password: &str,
) -> Result<SignIn, Problem> {
    let guess = match throttle::begin(login, address) {
        Ok(guess) => guess,
        Err(wait) => return Ok(SignIn::TooOften(wait)),
    };
    let Some(slot) = password::queue(address) else {
        guess.not_checked();
        return Ok(SignIn::TooOften(CROWD_PAUSE));
    };
    let identified = match identify(app, slot, login, password).await {
        Ok(identified) => identified,
        Err(problem) => {
            guess.not_checked();
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
    guess.succeeded();
    let mut transaction = tables::begin(&app.pool).await?;
    let token = Session::begin_for_person(&mut transaction, person).await?;
    let actor = Actor::new(format!("person:{login}")).at(address);
    let entry = Entry::new(&actor, Action::SignedIn, None, login).with(json!({"address": address}));
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(SignIn::Done(token))
}

enum Identified {
    /// The person's number.
    Person(i32),
    WrongPassword,
    Nobody,
}

/// The person with this login and password.
async fn identify(
    app: &Shared,
    slot: password::QueueSlot,
    login: &str,
    password: &str,
) -> Result<Identified, Problem> {
    let is_possible = login.len() <= LOGIN_BYTES_MAX && !login.contains('\0');
    let person = match is_possible {
        true => people::find(&app.pool, login).await?,
        false => None,
    };
    let hash = person.as_ref().map(|person| person.password_hash.as_str());
    let is_right = slot
        .verify(hash, password)
        .await
        .map_err(|error| Problem::internal("could not verify a password", error))?;
    Ok(match person {
        Some(person) if is_right => Identified::Person(person.id),
        Some(_) => Identified::WrongPassword,
        None => Identified::Nobody,
    })
}
