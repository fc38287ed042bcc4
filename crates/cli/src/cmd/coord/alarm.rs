//! `moim coord alarm …`.

use moim_wire_grpc::etcd::{AlarmAction, AlarmMember, AlarmType};
use serde::Serialize;

use super::AlarmVerb;
use crate::coordination::{change_failure, connect, failure};
use crate::exit::Outcome;
use crate::output::{Output, Report, Section, note_empty};
use crate::target::EtcdArgs;

#[derive(Serialize)]
struct Alarms {
    alarms: Vec<Raised>,
}

#[derive(Serialize)]
struct Raised {
    member: String,
    alarm: &'static str,
}

impl Report for Alarms {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&["MEMBER", "ALARM"]);
        for raised in &self.alarms {
            table.row(vec![raised.member.clone(), raised.alarm.to_owned()]);
        }
        vec![table]
    }
}

pub(super) async fn run(client: &EtcdArgs, verb: AlarmVerb, output: Output) -> Outcome {
    let client = connect(client).await?;
    let alarms = match verb {
        AlarmVerb::List => client.alarms().await.map_err(|error| failure(&error))?.alarms,
        AlarmVerb::Disarm => {
            let on = client.alarms().await.map_err(|error| failure(&error))?.alarms;
            for raised in &on {
                let alarm = AlarmType::try_from(raised.alarm).unwrap_or(AlarmType::None);
                let done = client.alarm(AlarmAction::Deactivate, raised.member_id, alarm).await;
                done.map_err(|error| change_failure(&error))?;
            }
            on
        }
    };
    let none = alarms.is_empty();
    output.print(&Alarms { alarms: alarms.iter().map(raised).collect() })?;
    if none {
        note_empty(output, "no alarms");
    }
    Ok(())
}

fn raised(alarm: &AlarmMember) -> Raised {
    let name = match AlarmType::try_from(alarm.alarm) {
        Ok(AlarmType::NoSpace) => "NOSPACE",
        Ok(AlarmType::Corrupt) => "CORRUPT",
        Ok(AlarmType::None) | Err(_) => "UNKNOWN",
    };
    Raised { member: format!("{:x}", alarm.member_id), alarm: name }
}
