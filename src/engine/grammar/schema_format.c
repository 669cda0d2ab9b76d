/* Formats of strings in a JSON schema, as regular expressions over ASCII.
 *
 * A format is an assertion here, so its expression accepts valid texts only: dates of the calendar with its leap years,
 * octets up to 255, all forms of an IPv6 address. Where the standards leave room, the usual spelling is taken (upper
 * case T and Z, no leap seconds, hosts of ASCII). Names that say nothing of a string's text are annotations, as are
 * unknown ones. */
#include "schema_internal.h"

/* clang-format off */
#define YEAR "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
#define LEAP_YEAR "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
#define DATE                                                                                                           \
    "(?:" YEAR "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"               \
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))|" LEAP_YEAR "-02-29)"
#define CLOCK "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
#define ZONE "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
#define DURATION_TIME "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
#define DURATION                                                                                                       \
    "P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:T" DURATION_TIME ")?|T"             \
    DURATION_TIME ")"
#define LABEL "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define PLAIN_LABEL "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,31}" /* no "--": neither xn-- nor what looks like it */
#define PLAIN_HOST PLAIN_LABEL "(?:\\." PLAIN_LABEL ")*"
#define HOST LABEL "(?:\\." LABEL ")*"
#define ATOM "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
#define EMAIL ATOM "(?:\\." ATOM ")*@" HOST
#define OCTET "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define IPV4 OCTET "(?:\\." OCTET "){3}"
#define H16 "[0-9A-Fa-f]{1,4}"
#define LS32 "(?:" H16 ":" H16 "|" IPV4 ")"
#define IPV6                                                                                                           \
    "(?:(?:" H16 ":){6}" LS32 "|::(?:" H16 ":){5}" LS32 "|(?:" H16 ")?::(?:" H16 ":){4}" LS32                          \
    "|(?:(?:" H16 ":){0,1}" H16 ")?::(?:" H16 ":){3}" LS32 "|(?:(?:" H16 ":){0,2}" H16 ")?::(?:" H16 ":){2}" LS32      \
    "|(?:(?:" H16 ":){0,3}" H16 ")?::" H16 ":" LS32 "|(?:(?:" H16 ":){0,4}" H16 ")?::" LS32                            \
    "|(?:(?:" H16 ":){0,5}" H16 ")?::" H16 "|(?:(?:" H16 ":){0,6}" H16 ")?::)"
#define HEX "[0-9A-Fa-f]"
#define ESCAPED "%" HEX HEX
#define PCHAR "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|" ESCAPED ")"
#define AUTHORITY                                                                                                      \
    "(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|" ESCAPED ")*@)?(?:\\[" IPV6 "\\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|" ESCAPED       \
    ")*)(?::[0-9]*)?"
#define URI_END "(?:\\?(?:" PCHAR "|[/?])*)?(?:#(?:" PCHAR "|[/?])*)?"
#define SEGMENTS "(?:/" PCHAR "*)*"
#define URI "[A-Za-z][A-Za-z0-9+.-]*:(?://" AUTHORITY SEGMENTS "|/(?:" PCHAR "+" SEGMENTS ")?|" PCHAR "+" SEGMENTS "|)" URI_END
#define PLAIN_PCHAR "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|" ESCAPED ")"
#define RELATIVE                                                                                                       \
    "(?://" AUTHORITY SEGMENTS "|/(?:" PCHAR "+" SEGMENTS ")?|" PLAIN_PCHAR "+" SEGMENTS "|)" URI_END
#define TEMPLATE_NAME "(?:[A-Za-z0-9_]|" ESCAPED ")(?:\\.?(?:[A-Za-z0-9_]|" ESCAPED "))*(?::[1-9][0-9]{0,3}|\\*)?"
#define URI_TEMPLATE                                                                                                   \
    "(?:[A-Za-z0-9._~!$&()*+,;=:@/?#\\[\\]-]|" ESCAPED "|\\{[+#./;?&]?" TEMPLATE_NAME "(?:," TEMPLATE_NAME ")*\\})*"
#define POINTER "(?:/(?:[^~/]|~[01])*)*"
/* Regular expressions that every dialect takes: characters, escapes, sets of letters, digits and escapes, and groups of
 * these in groups; repeated by signs or by one count. */
#define RE_SET "\\[\\^?(?:[A-Za-z0-9_ .,:;@#%=!<>]|a-z|A-Z|0-9|\\\\[dwsDWS.\\]\\[^-])+\\]"
#define RE_ATOM "(?:[^\\\\\\[\\](){}.*+?^$|]|\\\\[dwsDWSntr.*+?^$|()\\[\\]{}\\\\]|\\.|" RE_SET ")"
#define RE_TIMES "(?:(?:[*+?]|\\{[1-9][0-9]{0,2},?\\})\\?" "?)?"
#define RE_PLACE "[|^$]|\\\\[bB]"
#define RE_BODY "(?:" RE_PLACE "|" RE_ATOM RE_TIMES ")*"
#define RE_GROUP "\\((?:\\?:)?" RE_BODY "\\)" RE_TIMES
#define RE_OUTER "\\((?:\\?:)?(?:" RE_PLACE "|" RE_ATOM RE_TIMES "|" RE_GROUP ")*\\)" RE_TIMES
#define REGEX "(?:" RE_PLACE "|" RE_ATOM RE_TIMES "|" RE_OUTER ")*"
/* clang-format on */

static const struct {
    const char *name, *regex;
} formats[] = {
    {"date", DATE},
    /* A local time. RFC 3339 has an offset behind it, draft 3 had none; validators that know one refuse the other, and
     * what people mean by a time is the clock's. */
    {"time", CLOCK},
    {"date-time", DATE "T" CLOCK "(?:\\.[0-9]+)?" ZONE},
    {"duration", DURATION},
    {"email", EMAIL},
    {"idn-email", ATOM "(?:\\." ATOM ")*@" PLAIN_HOST},
    {"hostname", HOST},
    {"idn-hostname", PLAIN_HOST},
    {"host-name", HOST},
    {"ipv4", IPV4},
    {"ip-address", IPV4},
    {"ipv6", IPV6},
    {"uri", URI},
    {"iri", URI},
    {"uri-reference", "(?:" URI "|" RELATIVE ")"},
    {"iri-reference", "(?:" URI "|" RELATIVE ")"},
    {"uri-template", URI_TEMPLATE},
    {"uuid", HEX "{8}(?:-" HEX "{4}){3}-" HEX "{12}"},
    {"json-pointer", POINTER},
    {"relative-json-pointer", "(?:0|[1-9][0-9]*)(?:#|" POINTER ")"},
    {"regex", REGEX},
};

_Static_assert(DI_COUNT(formats) <= DI_SCHEMA_FORMATS, "room for the nodes of all formats");

int32_t di_schema_format_find(const char *name) {
    for (size_t i = 0; i < DI_COUNT(formats); i++) {
        if (strcmp(formats[i].name, name) == 0)
            return (int32_t)i;
    }
    return -1;
}

const di_node *di_schema_format_node(di_schema *s, int32_t format) {
    if (!s->formats[format])
        s->formats[format] = di_node_regex(s->g, formats[format].regex, strlen(formats[format].regex), false);
    return s->formats[format];
}

const di_regular *di_schema_format_set(di_schema *s, int32_t format) {
    if (!s->format_sets[format])
        s->format_sets[format] = di_regular_make(s->g, di_schema_format_node(s, format));
    return s->format_sets[format];
}
