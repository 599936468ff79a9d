#!/bin/sh
# A client of Flashpoint in curl: JSON, and safetensors files.
#
#     sh attention.sh [URL [KEY]]
set -eu
url=${1:-${FLASHPOINT_URL:-http://localhost:8000}} key=${2:-}
files=$(mktemp -d)
trap 'rm -r "$files"' EXIT

# ask PATH TYPE BODY: send BODY, and write the answer to $files/answer. curl retries 429 and 503 after their Retry-After,
# and also 408, 500, 502 and 504. For other errors ask prints the RFC 9457 problem in JSON, and fails.
ask() {
    status=$(curl -sS --max-time 60 --retry 4 --retry-max-time 60 -H "Content-Type: $2" -H 'X-Timeout-Ms: 60000' \
        ${key:+-H "Authorization: Bearer $key"} --data-binary "$3" -o "$files/answer" -w '%{http_code}' "$url$1")
    [ "$status" = 200 ] || { echo "refused: $(cat "$files/answer")"; return 1; }
}

# must NAME FOUND EXPECTED: exit if FOUND is not EXPECTED.
must() {
    [ "$2" = "$3" ] || { echo "$1 is $2, not $3" >&2; exit 1; }
    echo "$1 as it must be"
}

# Queries of zeros weigh all keys equally: the first query sees only the first key, the second the mean of both.
problem='"q": [[0, 0], [0, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]], "causal": true, "scale": 0.5'

ask /attention application/json "{$problem}"
must o "$(grep -o '"o":.*' "$files/answer")" '"o":[[1.0,2.0],[2.0,3.0]]}'

ask /attention/grad application/json "{$problem, \"do\": [[1, 1], [1, 1]], \"grads\": [\"dv\", \"dq\"]}"
must 'dv and dq' "$(grep -o '"dv":.*' "$files/answer")" '"dv":[[1.5,1.5],[0.5,0.5]],"dq":[[0.0,0.0],[-0.5,0.5]]}'

# A safetensors file: 8 bytes with the length of the JSON, the JSON, then the numbers. Here printf writes it.
head='{"__metadata__":{"causal":"true","scale":"0.5"}'
head=$head',"q":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}'
head=$head',"k":{"dtype":"F32","shape":[2,2],"data_offsets":[16,32]}'
head=$head',"v":{"dtype":"F32","shape":[2,2],"data_offsets":[32,48]}}'
zero='\000\000\000\000' one='\000\000\200\077' two='\000\000\000\100' three='\000\000\100\100' four='\000\000\200\100'
{
    printf "\\$(printf %o ${#head})\000\000\000\000\000\000\000" # the length of a head under 256 bytes
    printf %s "$head"
    printf "$zero$zero$zero$zero"
    printf "$one$zero$zero$one"
    printf "$one$two$three$four"
} >"$files/request.safetensors"

ask /attention application/vnd.safetensors "@$files/request.safetensors"
must 'o of a file' "$(tail -c 16 "$files/answer" | od -An -t f4 | tr -s ' ')" ' 1 2 2 3'

ask /attention application/json "{$problem, \"casual\": true}" || true
