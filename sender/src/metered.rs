//! Event data as the schema validator sees it, with a budget. A validator visits each part of the data as often as
//! its schema requires: data that does not match a recursive schema can be visited twice as often at each level.
//! Invariant: once the budget is spent, every part reads as null, which has no parts, so a running validation ends
//! immediately. Errors found from then on are meaningless and are recognized by their instance (`is_spent`).

use std::{borrow::Cow, cell::Cell, slice};

use jsonschema::{
    JsonType, ValidationError,
    json::{Array, Json, Node, NodeIdentity, Object, cmp, unique},
};
use serde_json::{Map, Number, Value, map};

static SPENT: Value = Value::Null;

/// The cost limit of one validation.
pub(crate) struct Budget {
    steps: Cell<u64>,
    /// Errors are large, and those of every branch are kept until the end.
    errors: Cell<u64>,
}

impl Budget {
    pub(crate) fn new(steps: u64, errors: u64) -> Self {
        Self {
            steps: Cell::new(steps),
            errors: Cell::new(errors),
        }
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.steps.get() == 0
    }

    fn spend(&self, steps: u64) {
        self.steps.set(self.steps.get().saturating_sub(steps));
    }

    fn note_error(&self) {
        match self.errors.get() {
            0 => self.steps.set(0),
            left => self.errors.set(left - 1),
        }
    }
}

/// Whether the error was found after the budget was spent.
pub(crate) fn is_spent(error: &ValidationError<'_>) -> bool {
    std::ptr::eq(error.instance().as_ref(), &SPENT)
}

/// The representation, for the validator's type.
pub(crate) struct Metered;

/// A part of the data.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    value: &'a Value,
    /// None for a property name, which is a value of its own.
    budget: Option<&'a Budget>,
}

impl<'a> Part<'a> {
    pub(crate) fn new(value: &'a Value, budget: &'a Budget) -> Self {
        Self {
            value,
            budget: Some(budget),
        }
    }

    /// The value. Costs a step.
    fn look(&self) -> &'a Value {
        if let Some(budget) = self.budget {
            budget.spend(1);
        }
        self.peek()
    }

    fn peek(&self) -> &'a Value {
        match self.budget {
            Some(budget) if budget.is_spent() => &SPENT,
            _ => self.value,
        }
    }
}

impl Json for Metered {
    type Node<'a> = Part<'a>;
    type PreparedKey = String;
    type StringBuffer = Value;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>(buffer: &mut Value, string: &str, f: impl FnOnce(Part<'_>) -> T) -> T {
        *buffer = Value::String(string.to_owned());
        f(Part {
            value: buffer,
            budget: None,
        })
    }
}

impl<'a> Node<'a, Metered> for Part<'a> {
    type Object = Members<'a>;
    type Array = Items<'a>;
    type Number = &'a Number;

    fn as_object(&self) -> Option<Members<'a>> {
        let members = self.look().as_object()?;
        Some(Members {
            members,
            budget: self.budget,
        })
    }

    fn as_array(&self) -> Option<Items<'a>> {
        let items = self.look().as_array()?;
        Some(Items {
            items,
            budget: self.budget,
        })
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        self.look().as_str().map(Cow::Borrowed)
    }

    fn as_number(&self) -> Option<&'a Number> {
        self.look().as_number()
    }

    fn as_boolean(&self) -> Option<bool> {
        self.look().as_bool()
    }

    fn is_null(&self) -> bool {
        self.look().is_null()
    }

    fn json_type(&self) -> JsonType {
        match self.look() {
            Value::Null => JsonType::Null,
            Value::Bool(_) => JsonType::Boolean,
            Value::Number(_) => JsonType::Number,
            Value::String(_) => JsonType::String,
            Value::Array(_) => JsonType::Array,
            Value::Object(_) => JsonType::Object,
        }
    }

    fn equals_value(&self, expected: &Value) -> bool {
        cmp::equal(self.look(), expected)
    }

    /// Only errors need it.
    fn to_value(&self) -> Cow<'a, Value> {
        if let Some(budget) = self.budget {
            budget.note_error();
        }
        Cow::Borrowed(self.peek())
    }

    fn identity(&self) -> Option<NodeIdentity> {
        Some(NodeIdentity::new(std::ptr::from_ref(self.value) as usize))
    }
}

pub(crate) struct Members<'a> {
    members: &'a Map<String, Value>,
    budget: Option<&'a Budget>,
}

impl<'a> Object<'a, Metered> for Members<'a> {
    type Node = Part<'a>;
    type MemberName = &'a str;
    type MembersIter = MembersIter<'a>;

    fn len(&self) -> usize {
        self.members.len()
    }

    fn get(&self, key: &String) -> Option<Part<'a>> {
        let value = self.members.get(key)?;
        Some(Part {
            value,
            budget: self.budget,
        })
    }

    fn members(&self) -> MembersIter<'a> {
        MembersIter {
            members: self.members.iter(),
            budget: self.budget,
        }
    }
}

pub(crate) struct MembersIter<'a> {
    members: map::Iter<'a>,
    budget: Option<&'a Budget>,
}

impl<'a> Iterator for MembersIter<'a> {
    type Item = (&'a str, Part<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, value) = self.members.next()?;
        let part = Part {
            value,
            budget: self.budget,
        };
        part.look();
        Some((name, part))
    }
}

pub(crate) struct Items<'a> {
    items: &'a [Value],
    budget: Option<&'a Budget>,
}

impl<'a> Array<'a, Metered> for Items<'a> {
    type Node = Part<'a>;
    type ElementsIter = ItemsIter<'a>;

    fn len(&self) -> usize {
        self.items.len()
    }

    fn elements(&self) -> ItemsIter<'a> {
        ItemsIter {
            items: self.items.iter(),
            budget: self.budget,
        }
    }

    fn is_unique(&self) -> bool {
        if let Some(budget) = self.budget {
            budget.spend(self.items.len() as u64);
        }
        unique::is_unique(self.items)
    }
}

pub(crate) struct ItemsIter<'a> {
    items: slice::Iter<'a, Value>,
    budget: Option<&'a Budget>,
}

impl<'a> Iterator for ItemsIter<'a> {
    type Item = Part<'a>;

    fn next(&mut self) -> Option<Part<'a>> {
        let value = self.items.next()?;
        let part = Part {
            value,
            budget: self.budget,
        };
        part.look();
        Some(part)
    }
}
