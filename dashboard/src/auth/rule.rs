//! Access rules: a table of rules and roles. Pure, and complete: nothing else decides access.

use postrider_proto::{PersonRole, state::KeyRole};

/// The access rule of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Everyone.
    Open,
    /// Any session, about that session: signing out.
    Session,
    /// A team member about their own account, regardless of role.
    Account,
    /// A page limited to what the session may see: the team, and customers in their own tenant.
    See,
    /// A form that changes nothing and renders such a page.
    Ask,
    /// Replays, pauses and tests: admins and operators, and customers in their own tenant.
    Operate,
    /// Endpoints and their secrets: admins, and customers in their own tenant.
    Manage,
    /// A page about the whole system: team members, regardless of role.
    SignedIn,
    /// People, keys, tenants: admins of the team.
    Administer,
    /// Admin keys.
    Admin,
    /// Admin and producer keys. The emit itself checks whether the tenant exists.
    Emit,
    /// Admin and tenant keys: resources shared by all tenants.
    Catalogue,
    /// Admin keys, and tenant keys for their own tenant. The tenant must exist.
    Own,
}

/// What a session may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Admin,
    Operator,
    /// Sees no secrets and changes nothing.
    ReadOnly,
    /// Entered through a portal link: full access to one tenant.
    Customer,
}

impl From<PersonRole> for Role {
    fn from(role: PersonRole) -> Self {
        match role {
            PersonRole::Admin => Self::Admin,
            PersonRole::Operator => Self::Operator,
            PersonRole::ReadOnly => Self::ReadOnly,
        }
    }
}

impl Rule {
    pub const ALL: [Self; 13] = [
        Self::Open,
        Self::Session,
        Self::Account,
        Self::See,
        Self::Ask,
        Self::Operate,
        Self::Manage,
        Self::SignedIn,
        Self::Administer,
        Self::Admin,
        Self::Emit,
        Self::Catalogue,
        Self::Own,
    ];

    /// Whether the rule requires a session. The others require a key, and `Open` nothing.
    pub const fn is_for_sessions(self) -> bool {
        matches!(
            self,
            Self::Session
                | Self::Account
                | Self::See
                | Self::Ask
                | Self::Operate
                | Self::Manage
                | Self::SignedIn
                | Self::Administer
        )
    }

    pub const fn admits_key(self, role: KeyRole) -> bool {
        match role {
            KeyRole::Admin => !self.is_for_sessions(),
            KeyRole::Producer => matches!(self, Self::Open | Self::Emit),
            KeyRole::Tenant => matches!(self, Self::Open | Self::Catalogue | Self::Own),
        }
    }

    pub const fn admits(self, role: Role) -> bool {
        match self {
            Self::Open | Self::Session | Self::See | Self::Ask => true,
            Self::Operate => matches!(role, Role::Admin | Role::Operator | Role::Customer),
            Self::Manage => matches!(role, Role::Admin | Role::Customer),
            Self::SignedIn | Self::Account => !matches!(role, Role::Customer),
            Self::Administer => matches!(role, Role::Admin),
            Self::Admin | Self::Emit | Self::Catalogue | Self::Own => false,
        }
    }

    /// Also considers the request method: a read-only role never changes anything, whatever the route's rule.
    pub const fn admits_request(self, role: Role, changes: bool) -> bool {
        let is_read = !changes || matches!(self, Self::Open | Self::Session | Self::Account | Self::Ask);
        self.admits(role) && (is_read || !matches!(role, Role::ReadOnly))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_reaches_its_own_rules_only() {
        use Rule::{
            Account, Admin, Administer, Ask, Catalogue, Emit, Manage, Open, Operate, Own, See, Session,
            SignedIn,
        };
        let keys =
            |role: KeyRole| -> Vec<Rule> { Rule::ALL.into_iter().filter(|r| r.admits_key(role)).collect() };
        assert_eq!(keys(KeyRole::Admin), [Open, Admin, Emit, Catalogue, Own]);
        assert_eq!(keys(KeyRole::Producer), [Open, Emit]);
        assert_eq!(keys(KeyRole::Tenant), [Open, Catalogue, Own]);

        let reach = |role: Role| -> Vec<Rule> { Rule::ALL.into_iter().filter(|r| r.admits(role)).collect() };
        assert_eq!(
            reach(Role::Admin),
            [
                Open, Session, Account, See, Ask, Operate, Manage, SignedIn, Administer
            ]
        );
        assert_eq!(
            reach(Role::Operator),
            [Open, Session, Account, See, Ask, Operate, SignedIn]
        );
        assert_eq!(
            reach(Role::ReadOnly),
            [Open, Session, Account, See, Ask, SignedIn]
        );
        assert_eq!(reach(Role::Customer), [Open, Session, See, Ask, Operate, Manage]);
    }

    #[test]
    fn whoever_only_looks_changes_nothing_but_their_own_account() {
        let changes: Vec<Rule> = Rule::ALL
            .into_iter()
            .filter(|rule| rule.admits_request(Role::ReadOnly, true))
            .collect();
        assert_eq!(changes, [Rule::Open, Rule::Session, Rule::Account, Rule::Ask]);
        assert!(Rule::See.admits_request(Role::ReadOnly, false));
    }
}
