/* See json.h. The text is one that gpusim.py wrote, so it is taken to be well formed. */
#include "json.h"

#include <stdlib.h>
#include <string.h>

static const char *past_blanks(const char *at) { return at + strspn(at, " \t\r\n"); }

static const char *past_string(const char *quote)
{
    const char *at = quote + 1;
    while (*at && *at != '"')
        at += (*at == '\\' && at[1]) ? 2 : 1;
    return *at ? at + 1 : at;
}

static const char *past_value(const char *at)
{
    int depth = 0;
    do {
        if (*at == '"') {
            at = past_string(at);
            continue;
        }
        if (*at == '{' || *at == '[')
            depth++;
        else if (*at == '}' || *at == ']')
            depth--;
        at++;
    } while (*at && (depth > 0 || !strchr(",]}", *at)));
    return at;
}

/* From the end of one member or element to the start of the next; NULL at the end of the object or array. */
static const char *next(const char *at)
{
    at = past_blanks(at);
    return *at == ',' ? past_blanks(at + 1) : NULL;
}

static const char *first(const char *container)
{
    const char *at = past_blanks(container + 1);
    return (*at == ']' || *at == '}' || !*at) ? NULL : at;
}

const char *json_get(const char *object, const char *key)
{
    for (const char *at = object ? first(object) : NULL; at;) {
        const char *value = past_blanks(past_blanks(past_string(at)) + 1);
        if (json_is(at, key))
            return *value == 'n' ? NULL : value;
        at = next(past_value(value));
    }
    return NULL;
}

const char *json_at(const char *array, int index)
{
    const char *at = array ? first(array) : NULL;
    while (at && index-- > 0)
        at = next(past_value(at));
    return at;
}

int json_count(const char *array)
{
    int count = 0;
    while (json_at(array, count))
        count++;
    return count;
}

unsigned long long json_number(const char *value, unsigned long long otherwise)
{
    return value ? strtoull(value, NULL, 10) : otherwise;
}

void json_text(const char *value, char *to, size_t size)
{
    size_t length = value ? (size_t)(past_string(value) - value) - 2 : 0;
    if (length >= size)
        length = size - 1;
    if (length)
        memcpy(to, value + 1, length);
    to[length] = '\0';
}

bool json_is(const char *value, const char *text)
{
    size_t length = strlen(text);
    return value && *value == '"' && !strncmp(value + 1, text, length) && value[length + 1] == '"';
}

bool json_contains(const char *array, const char *text)
{
    for (int i = 0; json_at(array, i); i++)
        if (json_is(json_at(array, i), text))
            return true;
    return false;
}
