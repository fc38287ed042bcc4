//! DeleteTopics (20): delete topics, by name or (versions 6+) by id.

use crate::codec::messages;
use crate::{KString, Uuid};

messages! {
    /// Asks to delete topics, by name or (versions 6+) by id.
    DeleteTopicsRequest(DeleteTopics) {
        topics: Vec<DeleteTopicState> [6..],
        topic_names: Vec<KString> [..=5, ignorable],
        timeout_ms: i32,
    }

    /// An entry of [`DeleteTopicsRequest::topics`].
    DeleteTopicState {
        name: Option<KString>,
        topic_id: Uuid,
    }

    /// The answer to [`DeleteTopicsRequest`].
    DeleteTopicsResponse(DeleteTopics) {
        throttle_time_ms: i32,
        responses: Vec<DeletableTopicResult>,
    }

    /// An entry of [`DeleteTopicsResponse::responses`].
    DeletableTopicResult {
        name: Option<KString> [null 6..] = Some(KString::default()),
        topic_id: Uuid [6.., ignorable],
        error_code: i16,
        error_message: Option<KString> [5.., ignorable],
    }
}
