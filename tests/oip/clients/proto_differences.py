"""Compare our .proto files with the messages of tritonclient; print the differences as a JSON list."""

import json

from tritonclient.grpc import model_config_pb2, service_pb2

from flashpoint_server.oip.grpc import protos


def differences(ours, theirs):
    for field in ours.fields:
        known = theirs.fields_by_name.get(field.name)
        where = f"{theirs.full_name}.{field.name}"
        if known is None:
            yield where
            continue
        for what in ("number", "type", "is_repeated"):
            if getattr(field, what) != getattr(known, what):
                yield f"{where}: {what}"
        if (field.containing_oneof and field.containing_oneof.name) != (
            known.containing_oneof and known.containing_oneof.name
        ):
            yield f"{where}: oneof"
        if field.message_type is not None:
            if field.message_type.full_name != known.message_type.full_name:
                yield f"{where}: {field.message_type.full_name}"
            if field.message_type.GetOptions().map_entry != known.message_type.GetOptions().map_entry:
                yield f"{where}: map"
            yield from differences(field.message_type, known.message_type)
        if field.enum_type is not None:
            values, others = ({v.name: v.number for v in e.values} for e in (field.enum_type, known.enum_type))
            if values != others:
                yield f"{where}: {values}"


def main():
    lines, methods = [], service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert model_config_pb2.ModelConfig.DESCRIPTOR.full_name == "inference.ModelConfig"
    for name, (request_type, answer_type) in protos.methods("inference.GRPCInferenceService").items():
        lines += differences(request_type.DESCRIPTOR, methods[name].input_type)
        lines += differences(answer_type.DESCRIPTOR, methods[name].output_type)
    print(json.dumps(lines))


main()
