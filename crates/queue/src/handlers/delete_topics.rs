//! DeleteTopics: deletes topics by name or by topic id.

use std::sync::Arc;

use moim_base::TopicId;
use moim_wire_kafka::messages::{DeletableTopicResult, DeleteTopicsRequest, DeleteTopicsResponse};
use moim_wire_kafka::{ErrorCode, KString, Uuid};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::partition::Refused;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: DeleteTopicsRequest,
    context: Request,
) -> DeleteTopicsResponse {
    let wanted: Vec<(Option<KString>, Uuid)> = if context.version >= 6 {
        request.topics.into_iter().map(|t| (t.name, t.topic_id)).collect()
    } else {
        request.topic_names.into_iter().map(|name| (Some(name), Uuid::ZERO)).collect()
    };
    let mut responses = Vec::with_capacity(wanted.len());
    for (name, id) in wanted {
        let mut result = DeletableTopicResult { name: name.clone(), topic_id: id, ..Default::default() };
        match delete(&broker, name.as_deref(), id).await {
            Ok((name, id)) => {
                result.name = Some(name);
                result.topic_id = id;
            }
            Err(refused) => {
                result.error_code = refused.code as i16;
                result.error_message = refused.message.map(Into::into);
            }
        }
        responses.push(result);
    }
    DeleteTopicsResponse { responses, ..Default::default() }
}

async fn delete(broker: &Broker, name: Option<&str>, id: Uuid) -> Result<(KString, Uuid), Refused> {
    let topic = match (name, id.is_zero()) {
        (Some(_), false) => {
            return Err(Refused::new(
                ErrorCode::InvalidRequest,
                "A topic is named by name or by id, not both.",
            ));
        }
        (None, true) => {
            return Err(Refused::new(ErrorCode::InvalidRequest, "Neither a name nor an id is given."));
        }
        (Some(name), true) => {
            broker.topics.catch_up(name).await?;
            broker.topics.get(name).ok_or(ErrorCode::UnknownTopicOrPartition)?
        }
        (None, false) => {
            broker.topics.get_by_id(TopicId::from_bytes(id.0)).ok_or(ErrorCode::UnknownTopicId)?
        }
    };
    if topic.is_internal() {
        return Err(Refused::new(ErrorCode::InvalidTopicException, "Internal topics cannot be deleted."));
    }
    broker.topics.delete(&topic).await?;
    broker.apply_topic_events();
    Ok(((&*topic.name).into(), Uuid(topic.id.to_bytes())))
}
