//! The `prost` codec, except that a malformed message is reported as a problem like any other client error. The usual
//! cause is a string that is not UTF-8.

use std::marker::PhantomData;

use prost::Message;
use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder},
};
use tonic_prost::ProstEncoder;

use super::status;
use crate::http::problem::Problem;

/// Named by the generated code.
#[derive(Debug, Clone)]
pub(crate) struct ProblemCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for ProblemCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for ProblemCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProblemDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProblemDecoder(PhantomData)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ProblemDecoder<U>(PhantomData<U>);

impl<U: Message + Default> Decoder for ProblemDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        U::decode(bytes)
            .map(Some)
            .map_err(|error| status(Problem::bad_request(format!("Malformed message: {error}."))))
    }
}
