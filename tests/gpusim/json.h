/* Just enough JSON for gpusim.json: a value is a pointer to its first character in the text, nothing is copied. */
#ifndef GPUSIM_JSON_H
#define GPUSIM_JSON_H

#include <stdbool.h>
#include <stddef.h>

/* The member `key` of an object, or NULL if there is none or it is null. */
const char *json_get(const char *object, const char *key);

/* Element `index` of an array, or NULL past its end. */
const char *json_at(const char *array, int index);

/* How many elements an array has; 0 for NULL. */
int json_count(const char *array);

/* An unsigned number; `otherwise` for NULL. */
unsigned long long json_number(const char *value, unsigned long long otherwise);

/* Copies a string's characters, cut to fit. Escapes are copied as they are: the names here have none. */
void json_text(const char *value, char *to, size_t size);

/* Whether a value is exactly this string. */
bool json_is(const char *value, const char *text);

/* Whether an array of strings contains `text`; false for NULL. */
bool json_contains(const char *array, const char *text);

#endif
